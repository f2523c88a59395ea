// SPDX-License-Identifier: Apache-2.0
#include "cpu/gradient_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/tiling.h"

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kLongestRow = 512;  // Problem::check's limit of the head dims

float log_add(float lse, float sink) {
  const float maximum = std::max(lse, sink);
  return maximum + std::log(std::exp(lse - maximum) + std::exp(sink - maximum));
}

// One head of one sequence; returns its share of dsink.
double find_head(const detail::PlanState& state, const Bindings& bindings, const Kernels& kernels,
                 const GradientRows& out, const Sequence& sequence, std::int64_t head) {
  const Problem& problem = state.problem;
  const RowView o = rows_of(problem, bindings[Slot::o], sequence);
  const RowView dout = rows_of(problem, bindings[Slot::dout], sequence);
  const ScalarView lse = scalars_of(problem, bindings[Slot::lse], sequence);
  const ScalarView dlse = scalars_of(problem, bindings[Slot::dlse], sequence);
  const Tensor& sinks = bindings[Slot::sink];
  const float sink = problem.sink ? sinks.as<float>()[head * sinks.strides[0]] : kNothing;
  const std::int64_t dv = problem.head_dim_v;
  constexpr std::int64_t kRows = 8;
  alignas(64) float o_rows[kRows * kLongestRow];
  alignas(64) float dout_rows[kRows * kLongestRow];
  float product[kRows];
  double dsink = 0.0;
  for (std::int64_t first = 0; first < sequence.q_length; first += kRows) {
    const std::int64_t count = std::min(kRows, sequence.q_length - first);
    for (std::int64_t i = 0; i < count; ++i) {
      kernels.load_row(problem.o_type, o.at(first + i, head), dv, 1.0F, o_rows + i * kLongestRow, padded(dv));
      kernels.load_row(problem.o_type, dout.at(first + i, head), dv, 1.0F, dout_rows + i * kLongestRow, padded(dv));
    }
    kernels.dot_rows(count, dv, o_rows, dout_rows, kLongestRow, product);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = first + i;
      const std::int64_t index = out.at(head, sequence.q_first + row);
      const float value = lse.at(row, head);
      if (value == kNothing) {
        out.shift[index] = -kNothing;
        out.delta[index] = 0.0F;
        continue;
      }
      const float shift = sink == kNothing ? value : log_add(value, sink);
      out.shift[index] = shift;
      out.delta[index] = product[i] - (dlse.base ? dlse.at(row, head) * std::exp(shift - value) : 0.0F);
      if (sink != kNothing) dsink -= static_cast<double>(std::exp(sink - shift) * product[i]);
    }
  }
  return dsink;
}

}  // namespace

GradientRows GradientRows::place(Arena& arena, const Problem& problem) {
  GradientRows rows;
  rows.rows = total_rows(problem);
  rows.shift = arena.take<float>(problem.heads_q * rows.rows);
  rows.delta = arena.take<float>(problem.heads_q * rows.rows);
  rows.dsink = arena.take<double>(problem.heads_q * problem.batch);
  return rows;
}

void find_gradient_rows(const detail::PlanState& state, const Bindings& bindings, const Kernels& kernels,
                        const GradientRows& rows) {
  const Problem& problem = state.problem;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(state.target.threads)
  for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
    for (std::int64_t head = 0; head < problem.heads_q; ++head) {
      const Sequence sequence = find_sequence(problem, bindings, batch);
      rows.dsink[batch * problem.heads_q + head] = find_head(state, bindings, kernels, rows, sequence, head);
    }
  }
  const Tensor& dsink = bindings[Slot::dsink];
  if (!dsink) return;
  for (std::int64_t head = 0; head < problem.heads_q; ++head) {
    float& target = dsink.as<float>()[head * dsink.strides[0]];
    double sum = problem.accumulate ? static_cast<double>(target) : 0.0;
    for (std::int64_t batch = 0; batch < problem.batch; ++batch) sum += rows.dsink[batch * problem.heads_q + head];
    target = static_cast<float>(sum);
  }
}

void store_gradient(const Problem& problem, const Kernels& kernels, DType dtype, float* source, std::int64_t count,
                    float factor, std::byte* target) {
  if (factor != 1.0F) {
    for (std::int64_t i = 0; i < count; ++i) source[i] *= factor;
  }
  if (problem.accumulate) {
    float* sum = reinterpret_cast<float*>(target);
    for (std::int64_t i = 0; i < count; ++i) sum[i] += source[i];
    return;
  }
  kernels.store_row(dtype, source, count, target);
}

}  // namespace tessera::cpu
