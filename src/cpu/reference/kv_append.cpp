// SPDX-License-Identifier: Apache-2.0
// The oracle's kv_append: writes new keys, rotated, and values behind those in a cache.
#include <vector>

#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

/// Rotates pairs (2j, 2j + 1) or (j, j + dims / 2) by the angles whose cosines and sines are in row `position`.
void rotate(const Problem& problem, const Bindings& bindings, Rounder round, DType dtype, std::int64_t position,
            std::vector<double>& row) {
  const std::int64_t half = problem.append.rotary_dim / 2;
  const Tensor& cos = bindings[Slot::rotary_cos];
  const Tensor& sin = bindings[Slot::rotary_sin];
  for (std::int64_t j = 0; j < half; ++j) {
    const bool interleaved = problem.append.rotary == Rotary::interleaved;
    double& x = row[static_cast<std::size_t>(interleaved ? 2 * j : j)];
    double& y = row[static_cast<std::size_t>(interleaved ? 2 * j + 1 : j + half)];
    const double c = read(cos, position * cos.strides[0] + j * cos.strides[1]);
    const double s = read(sin, position * sin.strides[0] + j * sin.strides[1]);
    const double rotated = round(dtype, round(dtype, x * c) - round(dtype, y * s));
    y = round(dtype, round(dtype, y * c) + round(dtype, x * s));
    x = rotated;
  }
}

}  // namespace

template <>
void compute_operation<Operation::kv_append>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                             std::uint32_t /*order*/, Result& result) {
  const Rounder round{arithmetic == Arithmetic::oracle};
  const Sequences sequences = resolve_sequences(problem, bindings);
  const bool rotates_q = static_cast<bool>(bindings[Slot::q_rotated]);
  const std::int64_t d = problem.head_dim_qk;
  const std::int64_t dv = problem.head_dim_v;
  result[Slot::k].resize(sequences.key_tokens[0] * problem.heads_kv * d);
  result[Slot::v].resize(sequences.key_tokens[0] * problem.heads_kv * dv);
  if (rotates_q) result[Slot::q_rotated].resize(sequences.query_tokens * problem.heads_q * d);
  const auto rotated = [&](Slot slot, std::int64_t token, std::int64_t head, std::int64_t position) {
    std::vector<double> row = load_row(bindings[slot], token, head, d);
    if (problem.append.rotary != Rotary::none) rotate(problem, bindings, round, bindings[slot].dtype, position, row);
    return row;
  };
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Rows& fresh = sequences.query[static_cast<std::size_t>(b)];
    const Rows& cache = sequences.keys[0][static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < fresh.length; ++i) {
      const std::int64_t position = cache.length + i;
      const std::int64_t from = fresh.first_token + i;
      const std::int64_t to = key_token(problem, bindings, 0, b, cache, position);
      for (std::int64_t h = 0; h < problem.heads_kv; ++h) {
        const std::vector<double> k = rotated(Slot::k_new, from, h, position);
        const std::vector<double> v = load_row(bindings[Slot::v_new], from, h, dv);
        const std::int64_t row = to * problem.heads_kv + h;
        for (std::int64_t c = 0; c < d; ++c) {
          result[Slot::k].set(row * d + c, round(problem.k_type, k[static_cast<std::size_t>(c)]));
        }
        for (std::int64_t c = 0; c < dv; ++c) {
          result[Slot::v].set(row * dv + c, round(problem.v_type, v[static_cast<std::size_t>(c)]));
        }
      }
      for (std::int64_t h = 0; rotates_q && h < problem.heads_q; ++h) {
        const std::vector<double> q = rotated(Slot::q, from, h, position);
        for (std::int64_t c = 0; c < d; ++c) {
          result[Slot::q_rotated].set((from * problem.heads_q + h) * d + c,
                                      round(problem.q_type, q[static_cast<std::size_t>(c)]));
        }
      }
    }
  }
}

}  // namespace tessera::reference
