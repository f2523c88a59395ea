// SPDX-License-Identifier: Apache-2.0
// NVRTC's entry points, found at run time. Types follow its ABI; no nvrtc.h is needed to build.
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
/// The same if that costs nothing: it is open, or the process has loaded one that nvrtc() would take. Else nullptr.
const Nvrtc* opened_nvrtc();

/// A file that may be NVRTC, found without opening it.
struct NvrtcFile {
  std::string path;
  std::string where;  // "TESSERA_NVRTC", "system library folder", "CUDA toolkit", "pip package", …
};
struct NvrtcFiles {
  std::vector<NvrtcFile> files;     // in the order in which they are to be tried
  std::vector<std::string> sought;  // every place looked at, for the error
  bool named = false;               // by a setting: nothing else is to be tried
};
NvrtcFiles nvrtc_files();
/// Whether the setting or TESSERA_NVRTC names the one to be taken.
bool nvrtc_is_named();

}  // namespace tessera::cuda
