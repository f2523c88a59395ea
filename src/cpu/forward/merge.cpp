// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward/merge.h"
#include "base/parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/tiles/tiling.h"

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

}  // namespace

PartialResults PartialResults::place(Arena& arena, const Problem& problem, std::int64_t splits) {
  PartialResults partials;
  if (splits <= 1) return partials;
  partials.heads = problem.heads_q;
  partials.rows = total_rows(problem);
  partials.dim = padded(problem.head_dim_v);
  partials.o = arena.take<float>(splits, partials.heads, partials.rows, partials.dim);
  partials.lse = arena.take<float>(splits, partials.heads, partials.rows);
  return partials;
}

void PartialResults::write(std::int64_t split, std::int64_t head, std::int64_t row, const float* result,
                           float value) const {
  const std::int64_t index = at(split, head, row);
  std::copy_n(result, dim, o + index * dim);
  lse[index] = value;
}

float softmax_inverse(float maximum, float sum, float sink) {
  if (sum == 0.0F) return 0.0F;
  // exp(sink − maximum) may overflow to infinity for a sink far above all scores; the quotient is 0 then, as it should.
  return 1.0F / (sum + (sink == kNothing ? 0.0F : std::exp(sink - maximum)));
}

void OutputRows::store(const Kernels& kernels, const float* result, std::int64_t row, std::int64_t head) const {
  std::byte* o = o_.at(row, head);
  kernels.store_row(problem_.o_type, result, problem_.head_dim_v, o);
  if (!problem_.residual) return;
  kernels.store_residual(problem_.o_type, result, o, problem_.head_dim_v,
                         reinterpret_cast<std::int8_t*>(residual_.at(row, head)));
}

void merge_partials(const PartialResults& partials, const detail::PlanState& state, const Bindings& bindings,
                    detail::Workers& workers, const Kernels& kernels) {
  const Problem& problem = state.problem;
  const std::int64_t splits = state.splits;
  const Tensor& sinks = bindings[Slot::sink];
  const std::int64_t dv = problem.head_dim_v;
  workers.parallel_for(problem.batch * problem.heads_q, [&](std::int64_t index) {
    const std::int64_t batch = index / problem.heads_q;
    const std::int64_t head = index % problem.heads_q;
    const Sequence sequence = find_sequence(problem, bindings, batch);
    const OutputRows o(problem, bindings, sequence);
    const ScalarView lse = scalars_of(problem, bindings[Slot::lse], sequence);
    const float sink = problem.sink ? sinks.as<float>()[head * sinks.strides[0]] : kNothing;
    for (std::int64_t row = 0; row < sequence.q_length; ++row) {
      const std::int64_t token = sequence.q_first + row;
      float maximum = kNothing;
      for (std::int64_t s = 0; s < splits; ++s) maximum = std::max(maximum, partials.lse[partials.at(s, head, token)]);
      float sum = 0.0F;
      float* result = partials.o + partials.at(0, head, token) * partials.dim;
      for (std::int64_t s = 0; s < splits; ++s) {
        const float partial = partials.lse[partials.at(s, head, token)];
        const float weight = partial == kNothing ? 0.0F : std::exp(partial - maximum);
        sum += weight;
        const float* from = partials.o + partials.at(s, head, token) * partials.dim;
        for (std::int64_t i = 0; i < dv; ++i) result[i] = (s == 0 ? 0.0F : result[i]) + weight * from[i];
      }
      const float inverse = softmax_inverse(maximum, sum, sink);
      for (std::int64_t i = 0; i < dv; ++i) result[i] *= inverse;
      o.store(kernels, result, row, head);
      if (lse.base) lse.at(row, head) = sum == 0.0F ? kNothing : maximum + std::log(sum);
    }
    write_empty_rows(problem, bindings, kernels, sequence, head, sequence.q_length, sequence.q_capacity,
                     partials.o + partials.at(0, head, sequence.q_first) * partials.dim);
  });
}

void write_empty_rows(const Problem& problem, const Bindings& bindings, const Kernels& kernels,
                      const Sequence& sequence, std::int64_t head, std::int64_t begin, std::int64_t end, float* zeros) {
  if (begin >= end) return;
  std::fill_n(zeros, padded(problem.head_dim_v), 0.0F);
  const OutputRows o(problem, bindings, sequence);
  const ScalarView lse = scalars_of(problem, bindings[Slot::lse], sequence);
  for (std::int64_t row = begin; row < end; ++row) {
    o.store(kernels, zeros, row, head);
    if (lse.base) lse.at(row, head) = kNothing;
  }
}

}  // namespace tessera::cpu
