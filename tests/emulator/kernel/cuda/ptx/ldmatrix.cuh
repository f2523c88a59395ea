// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

inline void ldmatrix_x4(u32 (&to)[4], u32 row_address, Place at = {}) {
  emulator::ldmatrix(to, row_address, false, at);
}
inline void ldmatrix_x4_transposed(u32 (&to)[4], u32 row_address, Place at = {}) {
  emulator::ldmatrix(to, row_address, true, at);
}
inline void stmatrix_x4(u32 row_address, const u32 (&from)[4], Place at = {}) {
  emulator::stmatrix(row_address, from, at);
}

}  // namespace tessera::cuda::ptx
