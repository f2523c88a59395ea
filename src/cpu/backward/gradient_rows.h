// SPDX-License-Identifier: Apache-2.0
// The values of every query row that the backward needs before its loops over tiles, and the gradient of the sinks.
#pragma once

#include <cstdint>

#include "base/parallel.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/sequence.h"
#include "plan/implementations.h"

namespace tessera::cpu {

/// Each is fp32 (heads_q, rows of all sequences); dsink is (batch, heads_q), in double because it sums over all rows. A
/// sink takes the share 1 − weight of a row's probability. With P = exp(S − shift) and dO' = weight·dO the gradients
/// are those of a row without a sink: dV = Pᵀ·dO' and dS = P∘(dO'·Vᵀ − delta).
struct GradientRows {
  float* shift = nullptr;   // LSE; +inf for an empty row, whose probabilities are then 0
  float* weight = nullptr;  // exp(LSE) / (exp(LSE) + exp(sink)); 1 without a sink
  float* delta = nullptr;   // rowsum(dO'∘O) − dLSE
  double* dsink = nullptr;
  std::int64_t rows = 0;

  static GradientRows place(Arena& arena, const Problem& problem);
  [[nodiscard]] std::int64_t at(std::int64_t head, std::int64_t row) const { return head * rows + row; }
};

/// Fills all three from O, LSE, dO, dLSE and the sinks, and writes the bound dsink.
void find_gradient_rows(const detail::PlanState& state, const Bindings& bindings, detail::Workers& workers,
                        const Kernels& kernels, const GradientRows& rows);

/// Writes a gradient row: target = source · factor, or target += source · factor if the problem accumulates (in fp32).
void store_gradient(const Problem& problem, const Kernels& kernels, DType dtype, float* source, std::int64_t count,
                    float factor, std::byte* target);

/// dtype of the gradient of a tensor of type `dtype`.
inline DType gradient_type(const Problem& problem, DType dtype) { return problem.grad_fp32 ? DType::fp32 : dtype; }

}  // namespace tessera::cpu
