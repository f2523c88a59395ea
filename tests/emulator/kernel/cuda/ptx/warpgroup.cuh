// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

inline void barrier_sync(int id, int threads, Place at = {}) { emulator::named_barrier(id, threads, true, at); }
inline void barrier_sync_of_branches(int id, int threads, Place at = {}) {
  emulator::named_barrier(id, threads, true, at);
}
inline void barrier_arrive(int id, int threads, Place at = {}) { emulator::named_barrier(id, threads, false, at); }
template <int registers>
void setmaxnreg_dec() {}
template <int registers>
void setmaxnreg_inc() {}
template <class T>
T uniform(T x, Place at = {}) {
  return __shfl_sync(0xffffffffU, x, 0, at);
}
inline int afresh(int x) { return x; }
inline int thread_index() { return static_cast<int>(threadIdx.x); }

}  // namespace tessera::cuda::ptx
