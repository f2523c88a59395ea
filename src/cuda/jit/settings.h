// SPDX-License-Identifier: Apache-2.0
// The settings of a process, which include/tessera/cuda.h lets it change. Defaults come from the environment, which is
// read when a setting is needed.
#pragma once

#include <string>
#include <string_view>

namespace tessera::cuda {

/// Passes a line to the log function, if there is one.
void log(std::string_view line);

/// The path that set_nvrtc was given; `changes` counts its calls.
struct NvrtcSetting {
  std::string path;
  unsigned changes = 0;
};
NvrtcSetting nvrtc_setting();

/// The path that set_kernel_pack was given, else $TESSERA_PACK. kNoPack means no pack, "" means to search for one.
struct PackSetting {
  std::string path;
  unsigned changes = 0;
};
PackSetting pack_setting();
inline constexpr const char* kNoPack = "none";
inline constexpr const char* kPackName = "tessera.pack";

/// The file that contains this code: libtessera, the Python extension or a program.
std::string own_file();

}  // namespace tessera::cuda
