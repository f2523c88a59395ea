// SPDX-License-Identifier: Apache-2.0
#include "cpu/scores/non_finite.h"

#include <bit>
#include <cmath>

namespace tessera::cpu {

void careful_matmul(const Kernels& kernels, SkipZerosOf which, std::int64_t m, std::int64_t n, std::int64_t k,
                    Broadcast a, const float* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc, bool accumulate,
                    const float* column_scale) {
  const auto add = [&](float left, float right, float sum) {
    return kernels.fused ? std::fma(left, right, sum) : sum + left * right;
  };
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0.0F;
      for (std::int64_t t = 0; t < k; ++t) {
        const float left = a.data[i * a.row + t * a.column];
        const float right = b[t * ldb + j];
        if ((which == SkipZerosOf::a ? left : right) == 0.0F) continue;
        sum = add(left, right, sum);
      }
      if (accumulate) sum = add(column_scale ? column_scale[j] : 1.0F, c[i * ldc + j], sum);
      c[i * ldc + j] = sum;
    }
  }
}

void careful_dots(SkipZerosOf which, std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a,
                  std::ptrdiff_t lda, const std::uint32_t* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc,
                  const float* column_scale) {
  const auto number = [](std::uint32_t bits) { return std::bit_cast<float>(bits << 16U); };
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = c[i * ldc + j] * (column_scale ? column_scale[j] : 1.0F);
      for (std::int64_t t = 0; t < k; ++t) {
        const float left = number(a[i * lda + t]);
        const std::uint32_t pair = b[t / 2 * ldb + j];
        const float right = number(t % 2 == 0 ? pair & 0xFFFFU : pair >> 16U);
        if ((which == SkipZerosOf::a ? left : right) != 0.0F) sum = std::fma(left, right, sum);
      }
      c[i * ldc + j] = sum;
    }
  }
}

}  // namespace tessera::cpu
