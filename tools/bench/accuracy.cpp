// SPDX-License-Identifier: Apache-2.0
#include "bench/accuracy.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "bench/work.h"
#include "cpu/reference/number.h"
#include "cpu/reference/sequences.h"

namespace tessera::cli {
namespace {

constexpr int kRows = 64;

double dot(const Tensor& a, std::int64_t a_at, const Tensor& b, std::int64_t b_at, std::int64_t count) {
  double sum = 0;
  for (std::int64_t c = 0; c < count; ++c) sum += reference::read(a, a_at + c) * reference::read(b, b_at + c);
  return sum;
}

}  // namespace

bool SampledOutput::takes(const BenchCase& bench_case) {
  const Problem& problem = bench_case.problem;
  return problem.operation == Operation::attention && problem.pass == Pass::forward && !problem.kv2 && !problem.alibi &&
         problem.score.empty() && problem.mask.empty() && !problem.sink && problem.dropout == 0.0F;
}

SampledOutput::SampledOutput(const BenchCase& bench_case, const Arrays& arrays) {
  const Problem& problem = bench_case.problem;
  const Bindings bindings = bindings_of(arrays);
  const Tensor &q = bindings[Slot::q], &k = bindings[Slot::k], &v = bindings[Slot::v];
  const reference::Sequences sequences = reference::resolve_sequences(problem, bindings);
  const reference::TileStates tiles(problem, problem.list, bindings, false);
  std::mt19937_64 random(1);
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  for (int at = 0; at < kRows && problem.batch > 0; ++at) {
    const std::int64_t b = below(problem.batch), head = below(problem.heads_q);
    const reference::Rows& queries = sequences.query[static_cast<std::size_t>(b)];
    const reference::Rows& keys = sequences.keys[0][static_cast<std::size_t>(b)];
    if (queries.length == 0) continue;
    Problem one = problem;
    one.seqlen_q = queries.length;
    one.kv.seqlen = keys.length;
    const std::int64_t query = below(queries.length);
    const auto [first, last] = visible_keys(one, query);
    Row row{queries.first_token + query, head, std::vector<double>(static_cast<std::size_t>(problem.head_dim_v), 0.0)};
    const std::int64_t q_at = reference::token_offset(q, row.token, head);
    std::vector<double> scores;
    std::vector<std::int64_t> tokens;
    for (std::int64_t key = first; key < last; ++key) {
      const reference::TileState listed = tiles.at(b, head, query / problem.block_q, key / problem.block_kv);
      if (listed == reference::TileState::skipped) continue;
      tokens.push_back(reference::key_token(problem, bindings, 0, b, keys, key));
      const std::int64_t k_at = reference::token_offset(k, tokens.back(), head / problem.group());
      double score = dot(q, q_at, k, k_at, problem.head_dim_qk) * static_cast<double>(problem.softmax_scale());
      if (problem.softcap > 0) score = problem.softcap * std::tanh(score / problem.softcap);
      scores.push_back(score);
    }
    const double most = scores.empty() ? 0.0 : *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (std::size_t key = 0; key < scores.size(); ++key) {
      const double weight = std::exp(scores[key] - most);
      sum += weight;
      const std::int64_t v_at = reference::token_offset(v, tokens[key], head / problem.group());
      for (std::size_t c = 0; c < row.o.size(); ++c) {
        row.o[c] += weight * reference::read(v, v_at + static_cast<std::int64_t>(c));
      }
    }
    for (double& element : row.o) element = sum == 0 ? 0.0 : element / sum;
    rows_.push_back(std::move(row));
  }
}

double SampledOutput::error_of(const Tensor& o) const {
  double apart = 0, whole = 0;
  for (const Row& row : rows_) {
    const std::int64_t at = reference::token_offset(o, row.token, row.head);
    for (std::size_t c = 0; c < row.o.size(); ++c) {
      const double difference = reference::read(o, at + static_cast<std::int64_t>(c)) - row.o[c];
      apart += difference * difference;
      whole += row.o[c] * row.o[c];
    }
  }
  return apart == 0 ? 0.0 : std::sqrt(apart / whole);
}

}  // namespace tessera::cli
