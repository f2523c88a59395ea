// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/schedule.h"

#include <algorithm>

#include "cuda/attention/forward/features.h"

namespace tessera::cuda {
namespace {

std::int64_t row_tiles(const FwdConfig& config, const Problem& problem, std::int64_t packed) {
  return (problem.seqlen_q * packed + config.tile_q - 1) / config.tile_q;
}

}  // namespace

std::int64_t count_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits) {
  const std::int64_t packed = packed_heads(problem);
  return row_tiles(config, problem, packed) * config.dv_parts * (problem.heads_q / packed) * problem.batch * splits;
}

std::int64_t count_deciding_blocks(const FwdConfig& config, const Problem& problem) {
  const std::int64_t blocks = count_blocks(config, problem, 1);
  return problem.batch_invariant && problem.batch > 0 ? blocks / problem.batch : blocks;
}

// Under a causal mask the last rows have the most to do. So an L2 group of heads begins with the last rows of all its
// heads, which lets the multiprocessors end together; its keys and values stay in L2. Without such a mask a group is
// one head, whose rows share its keys and values. All groups have equally many heads.
TileSchedule tile_schedule(const FwdConfig& config, const Problem& problem, std::int64_t splits, std::int64_t packed) {
  const std::int64_t heads = problem.heads_q / packed;  // or groups of packed heads
  const std::int64_t head_batches = std::max<std::int64_t>(heads * problem.batch * splits, 1);
  std::int64_t l2_group = 1;
  if ((problem.window.right && !problem.window.left) || problem.compressed_causal) {
    const std::int64_t bytes = count_keys(problem) * (problem.head_dim_qk * bytes_of(config.k_type()) +
                                                      problem.head_dim_v * bytes_of(config.v_type()));
    // Packed sequences differ in their numbers of row tiles, so a group is within one of them
    // (tiles/tile_scheduler.cuh).
    const std::int64_t whole = config.varlen ? heads * splits : head_batches;
    l2_group = std::clamp<std::int64_t>(kL2GroupBytes / std::max<std::int64_t>(bytes, 1), 1, whole);
    while (whole % l2_group != 0) --l2_group;
  }
  const std::int64_t tiles = std::max<std::int64_t>(row_tiles(config, problem, packed), 1);
  const auto divisor = [](std::int64_t n) { return Divisor(static_cast<int>(n)); };
  return {static_cast<int>(tiles * head_batches), static_cast<int>(tiles), divisor(tiles * l2_group), divisor(l2_group),
          divisor(heads)};
}

}  // namespace tessera::cuda
