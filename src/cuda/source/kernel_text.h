// SPDX-License-Identifier: Apache-2.0
// The ten lines by which a kernel's headers become a kernel of one configuration.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

struct KernelText {
  std::string file;                     // of src, that has what is called
  std::string definitions{};            // lines in front of the kernel: its configuration, callables
  std::string bounds;                   // of __launch_bounds__
  std::vector<std::string> parameters;  // "FwdParams params"
  std::string call;                     // what the kernel does: one expression
  bool has_memory = false;              // which has `memory`, dynamic shared memory, 1024-byte aligned
};

std::string to_string(const KernelText& kernel);

}  // namespace tessera::cuda
