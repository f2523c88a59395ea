// SPDX-License-Identifier: Apache-2.0
// Settings and queries of CUDA for the whole process: its GPUs, the run-time compiler, the cache of compiled kernels.
// Needs no CUDA header; libcuda and NVRTC are opened when they are first needed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

/// The properties of a GPU on which plans depend, and its name.
struct Device {
  int index = 0;
  std::string name;
  int sm = 0;  // compute capability, 90 for 9.0
  int multiprocessors = 0;
  std::int64_t shared_memory = 0;                 // opt-in bytes per block
  std::int64_t shared_memory_multiprocessor = 0;  // bytes that all blocks of a multiprocessor share
  std::int64_t memory = 0;                        // bytes
  std::int64_t l2 = 0;                            // bytes of L2 cache
  bool operator==(const Device&) const = default;
};

/// CUDA version of the driver, 13000 for 13.0. Throws Error{unsupported} with the places where libcuda was sought.
int driver_version();
/// The GPUs that the driver shows this process. Throws as driver_version does; empty when the driver has no GPU.
std::vector<Device> devices();

/// The run-time compiler.
struct Compiler {
  std::string path;
  int major = 0;
  int minor = 0;
};
/// Finds and opens NVRTC: the one that set_nvrtc names, else $TESSERA_NVRTC, else one that the process has loaded, else
/// one in the system's library folders, CUDA toolkits or pip's packages. Throws Error{unsupported} with every place
/// where it was sought.
Compiler compiler();
/// Sets the file of libnvrtc, or a folder that holds it; "" to search.
void set_nvrtc(std::string path);

/// The folder of compiled kernels: $XDG_CACHE_HOME/tessera or ~/.cache/tessera unless set; "" if none are kept. The
/// folder is used only if it belongs to this user or root and no other user can write it.
std::string cache_folder();
void set_cache_folder(std::string folder);

/// The pack: a file of kernels compiled ahead of time (`tessera compile --pack`), in which this process looks for a
/// kernel before it looks into the cache and compiles. It is the one that set_kernel_pack names, else $TESSERA_PACK,
/// else tessera.pack beside the code, as in a wheel, else share/tessera/tessera.pack of its prefix. "" if there is
/// none. A pack that cannot be used is ignored, which is logged.
std::string kernel_pack();
/// Sets the file of the pack; "none" for none; "" to search.
void set_kernel_pack(std::string path);

/// Receives log lines, without line ends: one before each compilation, one after it with its time, and one for a cache
/// entry that is corrupt or cannot be written, or for a pack that cannot be used. Called from the threads that compile,
/// by one at a time. nullptr, the default: nothing is logged.
using LogFunction = std::function<void(std::string_view line)>;
void set_log(LogFunction log);

}  // namespace tessera::cuda
