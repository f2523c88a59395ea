// SPDX-License-Identifier: Apache-2.0
// The operation `combine`: merges partial results over disjoint keys into one, which includes the sink once.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/parallel.h"
#include "cpu/forward/merge.h"
#include "cpu/implementations.h"
#include "cpu/tiles/sequence.h"

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kLongestRow = 512;  // Problem::check's limit of the head dims

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  return has_kernels_of({problem.q_type, problem.o_type});
}

void plan(detail::PlanState& state) { state.workspace_bytes = 0; }

// The tensor of one partial: `parts` without its leading dimension.
Tensor part_of(const Tensor& parts, std::int64_t part) {
  Tensor one = parts;
  one.rank = parts.rank - 1;
  for (std::size_t i = 0; i < static_cast<std::size_t>(one.rank); ++i) {
    one.shape[i] = parts.shape[i + 1];
    one.strides[i] = parts.strides[i + 1];
  }
  one.byte_offset += part * parts.strides[0] * static_cast<std::int64_t>(size_of(parts.dtype));
  return one;
}

void combine_row(const Problem& problem, const Bindings& bindings, const Kernels& kernels, const Sequence& rows,
                 std::int64_t row, std::int64_t head) {
  const Tensor& o_parts = bindings[Slot::o_parts];
  const Tensor& lse_parts = bindings[Slot::lse_parts];
  const Tensor& sinks = bindings[Slot::sink];
  const std::int64_t dv = problem.head_dim_v;
  const auto lse_of = [&](std::int64_t part) {
    return scalars_of(problem, part_of(lse_parts, part), rows).at(row, head);
  };
  float maximum = kNothing;
  for (std::int64_t part = 0; part < problem.combine.parts; ++part) maximum = std::max(maximum, lse_of(part));
  alignas(64) float sum_row[kLongestRow] = {};
  alignas(64) float part_row[kLongestRow];
  float sum = 0.0F;
  for (std::int64_t part = 0; part < problem.combine.parts; ++part) {
    const float lse = lse_of(part);
    if (lse == kNothing) continue;  // an empty partial may hold anything
    const float weight = std::exp(lse - maximum);
    sum += weight;
    const RowView o = rows_of(problem, part_of(o_parts, part), rows);
    kernels.load_row(problem.q_type, o.at(row, head), dv, weight, part_row, padded(dv));
    for (std::int64_t i = 0; i < dv; ++i) sum_row[i] += part_row[i];
  }
  const float sink = problem.sink ? sinks.as<float>()[head * sinks.strides[0]] : kNothing;
  const float inverse = softmax_inverse(maximum, sum, sink);
  for (std::int64_t i = 0; i < dv; ++i) sum_row[i] *= inverse;
  kernels.store_row(problem.o_type, sum_row, dv, rows_of(problem, bindings[Slot::o], rows).at(row, head));
  if (bindings[Slot::lse]) {
    scalars_of(problem, bindings[Slot::lse], rows).at(row, head) = sum == 0.0F ? kNothing : maximum + std::log(sum);
  }
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Kernels& kernels = kernels_for(state.target.isa);
  // Varlen partials are merged token by token, as if the tensor were one sequence.
  const bool varlen = problem.q_layout == Layout::varlen;
  const std::int64_t batches = varlen ? 1 : problem.batch;
  const std::int64_t length = varlen ? problem.total_q : problem.seqlen_q;
  // A task is 64 rows of a batch: one row is too little work for a task.
  constexpr std::int64_t kRows = 64;
  const std::int64_t tasks = detail::ceil_div(length, kRows);
  resources.workers.parallel_for(batches * tasks, [&](std::int64_t index) {
    const std::int64_t batch = index / tasks;
    const std::int64_t begin = index % tasks * kRows;
    for (std::int64_t row = begin; row < std::min(begin + kRows, length); ++row) {
      Sequence rows;
      rows.batch = batch;
      for (std::int64_t head = 0; head < problem.heads_q; ++head) {
        combine_row(problem, bindings, kernels, rows, row, head);
      }
    }
  });
}

}  // namespace

const Implementation kCombine = {{"cpu.combine", DeviceType::cpu, Operation::combine, supports, plan}, run};

}  // namespace tessera::cpu
