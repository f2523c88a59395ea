// SPDX-License-Identifier: Apache-2.0
#include "cpu/backward/gradient_rows.h"
#include "base/parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/scores/default_nan.h"
#include "cpu/tiles/tiling.h"

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kLongestRow = 512;  // Problem::check's limit of the head dims

// Computes the rows of one head of one sequence. Returns their part of dsink.
double find_head(const detail::PlanState& state, const Bindings& bindings, const Kernels& kernels,
                 const GradientRows& out, const Sequence& sequence, std::int64_t head) {
  const Problem& problem = state.problem;
  const RowView o = rows_of(problem, bindings[Slot::o], sequence);
  const RowView residual = rows_of(problem, bindings[Slot::o_residual], sequence);
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
    const std::int64_t index = out.at(head, sequence.q_first + first);
    const auto dot_rows = [&](bool weighted) {
      for (std::int64_t i = 0; i < count; ++i) {
        kernels.load_row(problem.o_type, o.at(first + i, head), dv, 1.0F, o_rows + i * kLongestRow, padded(dv));
        if (problem.residual) {
          kernels.add_residual(problem.o_type, reinterpret_cast<const std::int8_t*>(residual.at(first + i, head)), dv,
                               o_rows + i * kLongestRow);
        }
        kernels.load_row(problem.o_type, dout.at(first + i, head), dv, weighted ? out.weight[index + i] : 1.0F,
                         dout_rows + i * kLongestRow, padded(dv));
      }
      kernels.dot_rows(count, dv, o_rows, dout_rows, kLongestRow, product);
    };
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = lse.at(first + i, head);
      out.shift[index + i] = value == kNothing ? -kNothing : with_default_nan(value);
      out.weight[index + i] = sink == kNothing || value == kNothing ? 1.0F : 1.0F / (1.0F + std::exp(sink - value));
    }
    if (sink != kNothing) {
      dot_rows(false);
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = lse.at(first + i, head);
        if (value != kNothing) dsink -= static_cast<double>(product[i] / (1.0F + std::exp(value - sink)));
      }
    }
    dot_rows(true);
    for (std::int64_t i = 0; i < count; ++i) {
      const bool empty = lse.at(first + i, head) == kNothing;
      const float gradient = dlse.base ? with_default_nan(dlse.at(first + i, head)) : 0.0F;
      out.delta[index + i] = empty ? 0.0F : product[i] - gradient;
    }
  }
  return dsink;
}

}  // namespace

GradientRows GradientRows::place(Arena& arena, const Problem& problem) {
  GradientRows rows;
  rows.rows = total_rows(problem);
  rows.shift = arena.take<float>(problem.heads_q, rows.rows);
  rows.weight = arena.take<float>(problem.heads_q, rows.rows);
  rows.delta = arena.take<float>(problem.heads_q, rows.rows);
  rows.dsink = arena.take<double>(problem.heads_q, problem.batch);
  return rows;
}

void find_gradient_rows(const detail::PlanState& state, const Bindings& bindings, detail::Workers& workers,
                        const Kernels& kernels, const GradientRows& rows) {
  const Problem& problem = state.problem;
  workers.parallel_for(problem.batch * problem.heads_q, [&](std::int64_t index) {
    const std::int64_t batch = index / problem.heads_q;
    const std::int64_t head = index % problem.heads_q;
    const Sequence sequence = find_sequence(problem, bindings, batch);
    rows.dsink[batch * problem.heads_q + head] = find_head(state, bindings, kernels, rows, sequence, head);
  });
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
