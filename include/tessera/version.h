// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tessera {

inline constexpr int kVersionMajor = 0;
inline constexpr int kVersionMinor = 1;
inline constexpr int kVersionPatch = 0;

/// "0.1.0"
const char* version() noexcept;

/// Several "name: value" lines: version, compiler, build type, instruction sets (those of cpu_isas()), OpenMP, Highway.
std::string build_info();

}  // namespace tessera
