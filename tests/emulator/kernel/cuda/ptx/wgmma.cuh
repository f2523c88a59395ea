// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit(Place at = {}) { emulator::wgmma_commit(at); }
template <int later>
void wgmma_wait(Place at = {}) {
  emulator::wgmma_wait(later, at);
}
inline void wgmma_settle(float& /*result*/) {}
inline void wgmma_settle(int& /*result*/) {}
inline void wgmma_discard(float& result) { result = __builtin_nanf(""); }
inline void wgmma_wait_after(float sum, u32 barrier, Place at = {}) {
  if (sum < -1.0F) emulator::mbarrier_arrive(barrier, 0, at);
}

/// Of sums.
template <bool integers>
struct NumberOf {
  using type = float;
};
template <>
struct NumberOf<true> {
  using type = int;
};

template <int n, Element type>
struct Wgmma {
  static constexpr bool of_bytes = type == Element::e4m3 || type == Element::int8;
  using Number = NumberOf<type == Element::int8>::type;

  template <bool transposed = false, bool a_transposed = false>
  static void from_shared(Number* d, u64 a, u64 b, bool add, Place at = {}) {
    static_assert(!of_bytes || (!transposed && !a_transposed));
    emulator::wgmma({.d = d,
                     .a = a,
                     .b = b,
                     .a_own = {},
                     .n = n,
                     .bf16 = type == Element::bf16,
                     .e4m3 = type == Element::e4m3,
                     .int8 = type == Element::int8,
                     .add = add,
                     .a_in_registers = false,
                     .a_transposed = a_transposed,
                     .b_transposed = transposed,
                     .at = at});
  }
  static void from_registers(Number* d, const u32 (&a)[4], u64 b, bool add, Place at = {}) {
    emulator::wgmma({.d = d,
                     .a = 0,
                     .b = b,
                     .a_own = {a[0], a[1], a[2], a[3]},
                     .n = n,
                     .bf16 = type == Element::bf16,
                     .e4m3 = type == Element::e4m3,
                     .int8 = type == Element::int8,
                     .add = add,
                     .a_in_registers = true,
                     .a_transposed = false,
                     .b_transposed = !of_bytes,
                     .at = at});
  }
};

}  // namespace tessera::cuda::ptx
