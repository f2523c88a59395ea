// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime as a whole process sees it: which GPUs there are, which compiler, where compiled kernels are kept.
// Needs no CUDA header; libcuda and NVRTC are opened when they are first needed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

/// What a plan needs to know of a GPU, and its name.
struct Device {
  int index = 0;
  std::string name;
  int sm = 0;  // compute capability, 90 for 9.0
  int multiprocessors = 0;
  std::int64_t shared_memory = 0;                 // opt-in bytes a block
  std::int64_t shared_memory_multiprocessor = 0;  // bytes all blocks of a multiprocessor share
  std::int64_t memory = 0;                        // bytes
  std::int64_t l2 = 0;                            // bytes of L2 cache
  bool operator==(const Device&) const = default;
};

/// CUDA version of the driver, 13000 for 13.0. Throws Error{unsupported} naming where libcuda was sought.
int driver_version();
/// The GPUs that the driver shows this process. Throws as driver_version does; empty when the driver has no GPU.
std::vector<Device> devices();

/// The run-time compiler.
struct Compiler {
  std::string path;
  int major = 0;
  int minor = 0;
};
/// Finds and opens NVRTC: what set_nvrtc names, else $TESSERA_NVRTC, else one that the process has loaded, the system's
/// library folders, CUDA toolkits, pip's packages. Throws Error{unsupported} listing every place where it was sought.
Compiler compiler();
/// File of libnvrtc, or a folder that holds it; "" to search.
void set_nvrtc(std::string path);

/// Where compiled kernels are kept: $XDG_CACHE_HOME/tessera or ~/.cache/tessera unless set; "" when none are kept. The
/// folder is used only if it belongs to this user or root and no other user can write it.
std::string cache_folder();
void set_cache_folder(std::string folder);

/// The file of kernels compiled beforehand (`tessera compile --pack`) that this process looks into before it looks into
/// the cache and compiles: what set_kernel_pack names, else $TESSERA_PACK, else tessera.pack beside the code, as a
/// wheel has it, or share/tessera/tessera.pack of its prefix. "" when there is none; one that cannot be used is passed
/// over, which is logged.
std::string kernel_pack();
/// A pack's file; "none" for none; "" to search.
void set_kernel_pack(std::string path);

/// Receives one line, without its end, before each compilation and one after with its time, and one for a cache entry
/// that is corrupt or cannot be written, or a pack that cannot be used. Called from the threads that compile, one at a
/// time. nullptr: silence, which is the default.
using LogFunction = std::function<void(std::string_view line)>;
void set_log(LogFunction log);

}  // namespace tessera::cuda
