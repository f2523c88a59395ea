// SPDX-License-Identifier: Apache-2.0
// NVRTC's entry points, found at run time. Types follow its ABI, so that nvrtc.h is not needed to build.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/cuda.h"

namespace tessera::cuda {

inline constexpr int kNvrtcSuccess = 0;

struct Nvrtc {
  using Result = int;
  using Program = struct NvrtcProgram*;

  Result (*version)(int* major, int* minor) = nullptr;
  const char* (*error_string)(Result) = nullptr;
  Result (*create_program)(Program*, const char* source, const char* name, int headers, const char* const* texts,
                           const char* const* names) = nullptr;
  Result (*destroy_program)(Program*) = nullptr;
  Result (*compile_program)(Program, int count, const char* const* options) = nullptr;
  Result (*log_size)(Program, std::size_t*) = nullptr;
  Result (*log)(Program, char*) = nullptr;
  Result (*cubin_size)(Program, std::size_t*) = nullptr;
  Result (*cubin)(Program, char*) = nullptr;

  Compiler compiler;
};

/// The NVRTC of this process, opened on the first call. Throws Error{unsupported} as compiler() does.
const Nvrtc& nvrtc();
/// The same if it is open already, or if no setting names another and the process has loaded a libnvrtc, which nvrtc()
/// then tries first at no cost. Else, or if none can be used, nullptr.
const Nvrtc* opened_nvrtc();

/// A file that may be NVRTC, found without opening it.
struct NvrtcFile {
  std::string path;
  std::string where;  // "TESSERA_NVRTC", "system library folder", "CUDA toolkit", "pip package", …
};
struct NvrtcFiles {
  std::vector<NvrtcFile> files;     // in the order in which they are tried
  std::vector<std::string> sought;  // every place looked at, for the error
  bool named = false;               // a setting names the library: nothing else is tried
};
NvrtcFiles nvrtc_files();
/// Whether the setting or TESSERA_NVRTC names the library that must be taken.
bool nvrtc_is_named();

}  // namespace tessera::cuda
