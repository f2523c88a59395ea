// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

inline void tma_load(u32 to, const void* tensor_map, u32 barrier, int column, int head, int row, int batch,
                     Place at = {}) {
  emulator::tma_load(to, tensor_map, barrier, column, head, row, batch, at);
}
inline void tma_load_rows(u32 to, const void* tensor_map, u32 barrier, int panel, int eight, int page, Place at = {}) {
  emulator::tma_load_rows(to, tensor_map, barrier, panel, eight, page, at);
}
inline void tma_add(float* to, u32 from, u32 bytes, Place at = {}) { emulator::tma_add(to, from, bytes, at); }
inline void tma_store(float* to, u32 from, u32 bytes, Place at = {}) { emulator::tma_store(to, from, bytes, at); }
inline void tma_commit() { emulator::tma_commit(); }
inline void tma_wait_read() { emulator::tma_wait(); }
inline void tma_wait() { emulator::tma_wait(); }

}  // namespace tessera::cuda::ptx
