// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/ptx/aligned.cuh"
#include "shared/types.h"

namespace tessera::cuda::ptx {

inline void load_once_16(u32 (&value)[4], const void* from, Place at = {}) {
  __builtin_memcpy(value, aligned_16(from, at), 16);
}
template <class T>
void known_here(T*& /*address*/) {}
inline i64 load_index(const void* array, bool is_long, int index) {
  if (array == nullptr) return index;
  return is_long ? static_cast<const i64*>(array)[index] : static_cast<const int*>(array)[index];
}
// Blocks run one after another: what a block waits for one in front of it has done.
inline void await_count(const int* count, int least, Place at = {}) {
  if (*count < least) emulator::fail("a block waits for a count that no block in front of it has raised", at);
}
inline void fence_sums() {}
inline void raise_count(int* count, int value) { *count = *count < value ? value : *count; }
inline void store_once_16(void* to, const u32 (&value)[4], Place at = {}) {
  __builtin_memcpy(aligned_16(to, at), value, 16);
}

}  // namespace tessera::cuda::ptx
