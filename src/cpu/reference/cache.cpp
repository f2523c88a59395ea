// SPDX-License-Identifier: Apache-2.0
#include "cpu/reference/cache.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/reference/number.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void size(Output& output, std::int64_t count) {
  output.values.assign(static_cast<std::size_t>(count), 0.0);
  output.written.assign(static_cast<std::size_t>(count), 0);
}

void put(Output& output, std::int64_t index, double value) {
  output.values[static_cast<std::size_t>(index)] = value;
  output.written[static_cast<std::size_t>(index)] = 1;
}

/// One operation's rounding.
struct Rounding {
  bool oracle;
  [[nodiscard]] double operator()(DType dtype, double value) const {
    return oracle ? value : round_to(dtype, static_cast<float>(value));
  }
};

/// Pairs (2j, 2j + 1) or (j, j + dims / 2) turn by the angle whose cosine and sine stand in row `position`.
void rotate(const Problem& problem, const Bindings& bindings, Rounding round, DType dtype, std::int64_t position,
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
    const double turned = round(dtype, round(dtype, x * c) - round(dtype, y * s));
    y = round(dtype, round(dtype, y * c) + round(dtype, x * s));
    x = turned;
  }
}

std::vector<double> load(const Tensor& tensor, std::int64_t token, std::int64_t head, std::int64_t dim) {
  std::vector<double> row(static_cast<std::size_t>(dim));
  const std::int64_t at = token_offset(tensor, token, head);
  for (std::int64_t c = 0; c < dim; ++c) row[static_cast<std::size_t>(c)] = read(tensor, at + c);
  return row;
}

}  // namespace

void combine(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, Result& result) {
  const Rounding round{arithmetic == Arithmetic::oracle};
  const bool varlen = problem.q_layout == Layout::varlen;
  const std::int64_t tokens = varlen ? problem.total_q : problem.batch * problem.seqlen_q;
  const Tensor& o_parts = bindings[Slot::o_parts];
  const Tensor& lse_parts = bindings[Slot::lse_parts];
  size(result[Slot::o], tokens * problem.heads_q * problem.head_dim_v);
  if (problem.lse) size(result[Slot::lse], tokens * problem.heads_q);
  const auto part = [](const Tensor& parts, std::int64_t p) {
    Tensor one = parts;
    one.rank = parts.rank - 1;
    one.byte_offset += p * parts.strides[0] * static_cast<std::int64_t>(size_of(parts.dtype));
    std::copy(parts.shape.begin() + 1, parts.shape.end(), one.shape.begin());
    std::copy(parts.strides.begin() + 1, parts.strides.end(), one.strides.begin());
    return one;
  };
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int64_t b = varlen ? 0 : token / problem.seqlen_q;
    const Rows rows{0, 0, 0, 0};
    const std::int64_t i = varlen ? token : token % problem.seqlen_q;
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      std::vector<double> lse(static_cast<std::size_t>(problem.combine.parts));
      double largest = -kInfinity;
      bool empty = true;
      for (std::size_t p = 0; p < lse.size(); ++p) {
        const Tensor one = part(lse_parts, static_cast<std::int64_t>(p));
        lse[p] = read(one, lse_offset(one, b, h, rows, i));
        largest = std::max(largest, lse[p]);
        if (lse[p] != -kInfinity) empty = false;  // a NaN is no empty partial
      }
      std::vector<double> o(static_cast<std::size_t>(problem.head_dim_v), 0.0);
      double total = -kInfinity;
      if (!empty) {
        double sum = 0;
        for (const double l : lse) sum = round(DType::fp32, sum + round(DType::fp32, std::exp(l - largest)));
        total = round(DType::fp32, largest + round(DType::fp32, std::log(sum)));
        double kept = 1;  // share that the sink leaves
        if (problem.sink) {
          const double sink = read(bindings[Slot::sink], h * bindings[Slot::sink].strides[0]);
          kept = round(DType::fp32, 1 / (1 + std::exp(sink - total)));
        }
        for (std::size_t p = 0; p < lse.size(); ++p) {
          if (lse[p] == -kInfinity) continue;
          const double weight = round(DType::fp32, std::exp(lse[p] - total));
          const Tensor one = part(o_parts, static_cast<std::int64_t>(p));
          const std::vector<double> row = load(one, token, h, problem.head_dim_v);
          for (std::size_t c = 0; c < o.size(); ++c) {
            o[c] = round(DType::fp32, o[c] + round(DType::fp32, weight * row[c]));
          }
        }
        for (double& x : o) x = round(problem.o_type, x * kept);
      }
      for (std::int64_t c = 0; c < problem.head_dim_v; ++c) {
        put(result[Slot::o], (token * problem.heads_q + h) * problem.head_dim_v + c, o[static_cast<std::size_t>(c)]);
      }
      if (problem.lse) put(result[Slot::lse], lse_index(problem, b, h, rows, i), total);
    }
  }
}

void append(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, Result& result) {
  const Rounding round{arithmetic == Arithmetic::oracle};
  const Sequences sequences = resolve_sequences(problem, bindings);
  const bool rotates_q = static_cast<bool>(bindings[Slot::q_rotated]);
  const std::int64_t d = problem.head_dim_qk;
  const std::int64_t dv = problem.head_dim_v;
  size(result[Slot::k], sequences.key_tokens[0] * problem.heads_kv * d);
  size(result[Slot::v], sequences.key_tokens[0] * problem.heads_kv * dv);
  if (rotates_q) size(result[Slot::q_rotated], sequences.query_tokens * problem.heads_q * d);
  const auto turned = [&](Slot slot, std::int64_t token, std::int64_t head, std::int64_t position) {
    std::vector<double> row = load(bindings[slot], token, head, d);
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
        const std::vector<double> k = turned(Slot::k_new, from, h, position);
        const std::vector<double> v = load(bindings[Slot::v_new], from, h, dv);
        const std::int64_t row = to * problem.heads_kv + h;
        for (std::int64_t c = 0; c < d; ++c) {
          put(result[Slot::k], row * d + c, round(problem.k_type, k[static_cast<std::size_t>(c)]));
        }
        for (std::int64_t c = 0; c < dv; ++c) {
          put(result[Slot::v], row * dv + c, round(problem.v_type, v[static_cast<std::size_t>(c)]));
        }
      }
      for (std::int64_t h = 0; rotates_q && h < problem.heads_q; ++h) {
        const std::vector<double> q = turned(Slot::q, from, h, position);
        for (std::int64_t c = 0; c < d; ++c) {
          put(result[Slot::q_rotated], (from * problem.heads_q + h) * d + c,
              round(problem.q_type, q[static_cast<std::size_t>(c)]));
        }
      }
    }
  }
}

}  // namespace tessera::reference
