// SPDX-License-Identifier: Apache-2.0
// Matrix products for tiles with masked scores and values that are not finite: 0 · NaN must not reach the sum. Such
// tiles are rare, so the loops are simple.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd/kernels.h"

namespace tessera::cpu {

enum class SkipZerosOf { a, b };

/// As kernels.matmul, bit for bit, but without the terms whose factor from A (or B) is 0.
void careful_matmul(const Kernels& kernels, SkipZerosOf which, std::int64_t m, std::int64_t n, std::int64_t k,
                    Broadcast a, const float* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc, bool accumulate,
                    const float* column_scale);

/// The same for DotKernels::matmul with accumulate, for any m, n and k; the order of the sum differs.
void careful_dots(SkipZerosOf which, std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a,
                  std::ptrdiff_t lda, const std::uint32_t* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc,
                  const float* column_scale);

}  // namespace tessera::cpu
