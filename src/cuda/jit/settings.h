// SPDX-License-Identifier: Apache-2.0
// What include/tessera/cuda.h lets a process set. The environment is read once, when a setting is first needed.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cuda {

/// Hands a line to the log function, if there is one.
void log(std::string_view line);

/// What set_nvrtc was given; `changes` counts its calls.
struct NvrtcSetting {
  std::string path;
  unsigned changes = 0;
};
NvrtcSetting nvrtc_setting();

/// What set_kernel_pack was given, else $TESSERA_PACK; kNoPack for none, "" to search.
struct PackSetting {
  std::string path;
  unsigned changes = 0;
};
PackSetting pack_setting();
inline constexpr const char* kNoPack = "none";
inline constexpr const char* kPackName = "tessera.pack";

/// The file that holds this code: libtessera, the Python extension or a program.
std::string own_file();

}  // namespace tessera::cuda
