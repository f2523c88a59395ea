// SPDX-License-Identifier: Apache-2.0
#include "bench/work.h"

#include <algorithm>

namespace tessera::cli {
namespace {

std::int64_t key_count(const Problem& problem) { return problem.kv.seqlen + (problem.kv2 ? problem.kv2->seqlen : 0); }

// Visible (row, key) pairs of one head of one sequence.
double visible_pairs(const Problem& problem, const KeptTiles& kept) {
  const std::int64_t key_blocks = problem.key_blocks();
  double pairs = 0;
  std::vector<std::int64_t> listed;  // by the row's query block
  for (std::int64_t row = 0; row < problem.seqlen_q; ++row) {
    const auto [first, last] = visible_keys(problem, row);
    if (kept.empty()) {
      pairs += static_cast<double>(last - first);
      continue;
    }
    if (row % problem.block_q == 0) {
      listed.clear();
      const std::int64_t line = row / problem.block_q * key_blocks;
      for (std::int64_t block = 0; block < key_blocks; ++block) {
        if (kept[static_cast<std::size_t>(line + block)]) listed.push_back(block);
      }
    }
    for (const std::int64_t block : listed) {
      const std::int64_t begin = std::max(first, block * problem.block_kv);
      const std::int64_t end = std::min(last, (block + 1) * problem.block_kv);
      pairs += static_cast<double>(std::max<std::int64_t>(0, end - begin));
    }
  }
  return pairs;
}

// Packed sequences as make_inputs has them.
Problem of_equal_lengths(Problem problem) {
  const auto cut = [&](std::int64_t& longest, std::int64_t total) {
    longest = equal_length(problem.batch, longest, total);
  };
  if (problem.q_layout == Layout::varlen) cut(problem.seqlen_q, problem.total_q);
  if (problem.kv.layout == KvLayout::varlen) cut(problem.kv.seqlen, problem.kv.total);
  return problem;
}

double count(const std::vector<std::int64_t>& shape) {
  double product = 1;
  for (const std::int64_t size : shape) product *= static_cast<double>(size);
  return product;
}

// What waits in the ring of a sequence, on average over the steps from one flush to the next, and how many these are.
struct Waiting {
  double tokens, steps;
};
Waiting waiting_of(const Problem& problem) {
  const std::int64_t tokens = std::max<std::int64_t>(problem.seqlen_q, 1);
  const std::int64_t whole_steps = problem.linear.ring / tokens;
  const auto steps = static_cast<double>(whole_steps);
  return {static_cast<double>(tokens) * (steps + 1) / 2, problem.only_flushes() ? 1.0 : steps};
}

// The states of the batch are read and written, with a ring written by each flush, by a backward read, whatever the
// pool holds besides. Of the ring the tokens that wait are read and those of the step written.
Work linear_work(const Problem& problem) {
  const auto elements = static_cast<double>(problem.batch * problem.heads_q * problem.head_dim_qk * problem.head_dim_v);
  Work work;
  const bool backward = problem.pass == Pass::backward;
  const bool decode = problem.operation == Operation::linear_decode;
  const Waiting waiting = problem.linear.ring > 0 ? waiting_of(problem) : Waiting{0, 1};
  const double passes = backward ? 1 : 1 + 1 / waiting.steps;
  if (decode || problem.linear.states > 0)
    work.bytes = passes * elements * static_cast<double>(size_of(problem.linear.state_type));
  for (const auto& slots : {value_inputs(problem), outputs(problem)}) {
    for (const SlotShape& slot : slots) {
      if (slot.slot == Slot::ring_k || slot.slot == Slot::ring_v) {
        const double rows = waiting.tokens + static_cast<double>(problem.seqlen_q);
        work.bytes += static_cast<double>(problem.batch * problem.heads_q * slot.shape.back()) * rows *
                      static_cast<double>(size_of(slot.dtype));
        continue;
      }
      if (slot.slot != Slot::state) work.bytes += count(slot.shape) * static_cast<double>(size_of(slot.dtype));
    }
  }
  // A step: decay, k·v and its sum, q·s and its sum. In chunks the decay is no work for each element. Backward: S and
  // its product, G and two.
  work.flops = (decode ? 5.0 : backward ? 10.0 : 4.0) * elements * static_cast<double>(problem.seqlen_q);
  if (problem.only_flushes()) work.flops = 3 * elements * waiting.tokens;
  return work;
}

// The share of the cache's rows that hold keys.
double used_share(const BenchCase& bench_case) {
  const Problem& problem = bench_case.problem;
  const std::int64_t rows = problem.batch * problem.kv.seqlen;
  if (bench_case.key_lengths.empty() || rows == 0) return 1;
  std::int64_t used = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) used += bench_case.key_length(b);
  return static_cast<double>(used) / static_cast<double>(rows);
}

// The share of key blocks that some query block of a head has on its list. `kept`: of each list.
double listed_share(const Problem& problem, const std::vector<KeptTiles>& kept) {
  const std::int64_t key_blocks = problem.key_blocks();
  if (!problem.list || kept.empty() || key_blocks == 0) return 1;
  const std::int64_t sharing = problem.list.heads == TileList::Heads::q ? problem.group() : 1;  // lists of a key head
  std::int64_t listed = 0, all = 0;
  for (std::size_t first = 0; first < kept.size(); first += static_cast<std::size_t>(sharing)) {
    std::vector<bool> any(static_cast<std::size_t>(key_blocks), false);
    for (std::size_t one = first; one < std::min(kept.size(), first + static_cast<std::size_t>(sharing)); ++one) {
      for (std::size_t tile = 0; tile < kept[one].size(); ++tile) {
        if (kept[one][tile]) any[tile % static_cast<std::size_t>(key_blocks)] = true;
      }
    }
    listed += std::count(any.begin(), any.end(), true);
    all += key_blocks;
  }
  return static_cast<double>(listed) / static_cast<double>(all);
}

}  // namespace

std::int64_t equal_length(std::int64_t batch, std::int64_t longest, std::int64_t total) {
  return batch == 0 ? 0 : std::min(longest, total / batch);
}

std::pair<std::int64_t, std::int64_t> visible_keys(const Problem& problem, std::int64_t row) {
  const std::int64_t keys = key_count(problem);
  const std::int64_t position = row + (problem.compressed_causal ? 0 : keys - problem.seqlen_q);
  std::int64_t first = 0, last = keys;
  if (problem.window.left) first = std::max(first, position - *problem.window.left);
  if (problem.window.right) last = std::min(last, position + *problem.window.right + 1);
  if (problem.compressed_causal) {
    const std::int64_t room = position + 1 - problem.compressed_causal->length;
    last = std::min(last, room < 0 ? 0 : room / problem.compressed_causal->stride + 1);
  }
  if (problem.chunk > 0) {
    const std::int64_t ahead = (position % problem.chunk + problem.chunk) % problem.chunk;
    first = std::max(first, position - ahead);
    last = std::min(last, position - ahead + problem.chunk);
  }
  first = std::min(first, keys);
  return {first, std::max(first, last)};
}

Work work_of(const BenchCase& bench_case, const std::vector<KeptTiles>& kept) {
  const Problem& problem = bench_case.problem;
  Work work;
  if (problem.is_linear()) return linear_work(problem);
  const bool appends = problem.operation == Operation::kv_append;
  const double keys_listed = listed_share(problem, kept);
  for (const SlotShape& slot : value_inputs(problem)) {
    // A run touches only the new tokens' places of the cache: as many bytes as they bring.
    if (appends && (slot.slot == Slot::k || slot.slot == Slot::v)) continue;
    if (appends && (slot.slot == Slot::k_new || slot.slot == Slot::v_new)) {
      work.bytes += count(slot.shape) * static_cast<double>(size_of(slot.dtype));
    }
    const bool of_keys = slot.slot == Slot::k || slot.slot == Slot::v;
    const double share = of_keys ? std::min(used_share(bench_case), keys_listed) : 1;
    work.bytes += count(slot.shape) * static_cast<double>(size_of(slot.dtype)) * share;
  }
  for (const SlotShape& slot : outputs(problem)) {
    work.bytes += count(slot.shape) * static_cast<double>(size_of(slot.dtype));
  }
  if (problem.operation != Operation::attention) return work;
  double pairs = 0;
  if (!bench_case.lengths.empty() || !bench_case.key_lengths.empty()) {
    Problem one = of_equal_lengths(problem);
    const bool packs_keys = problem.kv.layout == KvLayout::varlen;
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      if (!bench_case.lengths.empty()) one.seqlen_q = bench_case.lengths[static_cast<std::size_t>(b)];
      one.kv.seqlen = packs_keys ? one.seqlen_q : bench_case.key_length(b);
      pairs += visible_pairs(one, {}) * static_cast<double>(problem.heads_q);
    }
  } else if (kept.empty()) {
    pairs = visible_pairs(of_equal_lengths(problem), {}) * static_cast<double>(problem.batch * problem.heads_q);
  } else {
    // Every row of the list stands for the same number of (batch, head) pairs.
    for (const KeptTiles& each : kept) pairs += visible_pairs(problem, each);
    pairs *= static_cast<double>(problem.batch * problem.heads_q) / static_cast<double>(kept.size());
  }
  const auto d = static_cast<double>(problem.head_dim_qk), dv = static_cast<double>(problem.head_dim_v);
  // Forward: QKᵀ and PV. Backward: QKᵀ again, dO·Vᵀ, dV, dQ, dK.
  work.flops = pairs * (problem.pass == Pass::forward ? 2 * (d + dv) : 2 * (3 * d + 2 * dv));
  return work;
}

}  // namespace tessera::cli
