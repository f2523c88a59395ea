// SPDX-License-Identifier: Apache-2.0
// What host and device code say alike. Compiled by g++ and NVRTC: no std headers anywhere in src/shared.
#pragma once

namespace tessera::cuda {

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

enum class Element : unsigned char { bf16, fp16, fp32 };

constexpr int bytes_of(Element element) { return element == Element::fp32 ? 4 : 2; }

template <class Int>
constexpr Int divide_up(Int a, Int b) {
  return (a + b - 1) / b;
}

template <class Int>
constexpr Int round_up(Int a, Int b) {
  return divide_up(a, b) * b;
}

}  // namespace tessera::cuda
