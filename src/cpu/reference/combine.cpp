// SPDX-License-Identifier: Apache-2.0
// The oracle's merging of partial results.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

template <>
void compute_operation<Operation::combine>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                           std::uint32_t /*order*/, Result& result) {
  const Rounder round{arithmetic == Arithmetic::oracle};
  const bool varlen = problem.q_layout == Layout::varlen;
  const std::int64_t tokens = varlen ? problem.total_q : problem.batch * problem.seqlen_q;
  const Tensor& o_parts = bindings[Slot::o_parts];
  const Tensor& lse_parts = bindings[Slot::lse_parts];
  result[Slot::o].resize(tokens * problem.heads_q * problem.head_dim_v);
  if (problem.lse) result[Slot::lse].resize(tokens * problem.heads_q);
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
          const std::vector<double> row = load_row(one, token, h, problem.head_dim_v);
          for (std::size_t c = 0; c < o.size(); ++c) {
            o[c] = round(DType::fp32, o[c] + round(DType::fp32, weight * row[c]));
          }
        }
        for (double& x : o) x = round(problem.o_type, x * kept);
      }
      for (std::int64_t c = 0; c < problem.head_dim_v; ++c) {
        result[Slot::o].set((token * problem.heads_q + h) * problem.head_dim_v + c, o[static_cast<std::size_t>(c)]);
      }
      if (problem.lse) result[Slot::lse].set(lse_index(problem, b, h, rows, i), total);
    }
  }
}

}  // namespace tessera::reference
