// SPDX-License-Identifier: Apache-2.0
// The operation `kv_append`: writes new keys and values into a cache, dense or paged, with optional rotary embedding
// (Su et al. 2021, RoFormer) of the new keys, and of the queries at the same positions.
#include <algorithm>

#include "base/checked.h"
#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/sequence.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kLongestRow = 512;  // Problem::check's limit of the head dims

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  // Rows that are not rotated are copied, whatever their type.
  if (problem.append.rotary == Rotary::none) return Support::yes();
  return has_kernels_of({problem.q_type, problem.k_type});
}

void plan(detail::PlanState& state) { state.workspace_bytes = 0; }

// Rotates the first rotary_dim elements of a row by the angles of a position.
void rotate(const Problem& problem, const Bindings& bindings, const Kernels& kernels, std::int64_t position,
            float* row) {
  const Tensor& cosines = bindings[Slot::rotary_cos];
  const Tensor& sines = bindings[Slot::rotary_sin];
  const std::int64_t pairs = problem.append.rotary_dim / 2;
  alignas(64) float cosine[kLongestRow];
  alignas(64) float sine[kLongestRow];
  const auto load = [&](const Tensor& table, float* target) {
    const std::ptrdiff_t bytes = position * table.strides[0] * static_cast<std::ptrdiff_t>(size_of(table.dtype));
    kernels.load_row(table.dtype, table.bytes() + bytes, pairs, 1.0F, target, padded(pairs));
  };
  load(cosines, cosine);
  load(sines, sine);
  const bool half = problem.append.rotary == Rotary::half;
  for (std::int64_t j = 0; j < pairs; ++j) {
    float& x = row[half ? j : 2 * j];
    float& y = row[half ? j + pairs : 2 * j + 1];
    const float rotated = x * cosine[j] - y * sine[j];
    y = y * cosine[j] + x * sine[j];
    x = rotated;
  }
}

struct Token {
  std::int64_t row;       // in the new tensors
  std::int64_t position;  // in the cache
};

void move_row(const Problem& problem, const Bindings& bindings, const Kernels& kernels, DType dtype, std::int64_t dim,
              bool rotates, std::int64_t position, const std::byte* source, std::byte* target) {
  if (!rotates || problem.append.rotary == Rotary::none) {
    std::copy_n(source, static_cast<std::size_t>(dim) * size_of(dtype), target);
    return;
  }
  alignas(64) float row[kLongestRow];
  kernels.load_row(dtype, source, dim, 1.0F, row, padded(dim));
  rotate(problem, bindings, kernels, position, row);
  kernels.store_row(dtype, row, dim, target);
}

void append_token(const Problem& problem, const Bindings& bindings, const Kernels& kernels, const Sequence& sequence,
                  const KeyView& k, const KeyView& v, Token token) {
  const RowView k_new = rows_of(problem, bindings[Slot::k_new], sequence);
  const RowView v_new = rows_of(problem, bindings[Slot::v_new], sequence);
  for (std::int64_t head = 0; head < problem.heads_kv; ++head) {
    move_row(problem, bindings, kernels, problem.k_type, problem.head_dim_qk, true, token.position,
             k_new.at(token.row, head), k.at(token.position, head));
    move_row(problem, bindings, kernels, problem.v_type, problem.head_dim_v, false, token.position,
             v_new.at(token.row, head), v.at(token.position, head));
  }
  if (!bindings[Slot::q]) return;
  const RowView q = rows_of(problem, bindings[Slot::q], sequence);
  const RowView rotated = rows_of(problem, bindings[Slot::q_rotated], sequence);
  for (std::int64_t head = 0; head < problem.heads_q; ++head) {
    move_row(problem, bindings, kernels, problem.q_type, problem.head_dim_qk, true, token.position,
             q.at(token.row, head), rotated.at(token.row, head));
  }
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Kernels& kernels = kernels_for(state.target.isa);
  const Tensor& lengths = bindings[Slot::seqused_k];
  constexpr std::int64_t kRows = 64;
  const std::int64_t tasks = detail::ceil_div(problem.seqlen_q, kRows);
  resources.workers.parallel_for(problem.batch * tasks, [&](std::int64_t index) {
    const std::int64_t batch = index / tasks;
    const std::int64_t begin = index % tasks * kRows;
    for (std::int64_t row = begin; row < std::min(begin + kRows, problem.seqlen_q); ++row) {
      const Sequence sequence = find_query_rows(problem, bindings, batch);
      if (row >= sequence.q_length) continue;
      const std::int64_t before = lengths.as<std::int32_t>()[batch * lengths.strides[0]];
      const KeyView k = keys_of(problem, bindings, bindings[Slot::k], 0, batch);
      const KeyView v = keys_of(problem, bindings, bindings[Slot::v], 0, batch);
      append_token(problem, bindings, kernels, sequence, k, v, {row, before + row});
    }
  });
}

}  // namespace

const Implementation kKvAppend = {{"cpu.kv_append", DeviceType::cpu, Operation::kv_append, supports, plan}, run};

}  // namespace tessera::cpu
