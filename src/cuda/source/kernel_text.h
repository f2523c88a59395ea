// SPDX-License-Identifier: Apache-2.0
// The few lines of source that make a kernel of one configuration from a header.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

struct KernelText {
  std::string file;                     // the header that `call` needs, relative to src
  std::string definitions{};            // lines before the kernel: its configuration, callables
  std::string bounds;                   // arguments of __launch_bounds__
  std::vector<std::string> parameters;  // "FwdParams params"
  std::string call;                     // the body of the kernel: one expression
  bool has_memory = false;              // whether `call` uses `memory`: dynamic shared memory, 1024-byte aligned
};

std::string to_string(const KernelText& kernel);

}  // namespace tessera::cuda
