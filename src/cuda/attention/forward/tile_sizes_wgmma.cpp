// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/forward/tile_sizes.h"
#include "cuda/attention/tiles/list_params.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kManyRows = 2048;

// Returns the packed rows of a sequence: for varlen the mean, unless batch_invariant forbids a dependence on the batch.
std::int64_t usual_rows(const Problem& problem) {
  const bool varies = problem.q_layout == Layout::varlen && !problem.batch_invariant && problem.batch > 0;
  const std::int64_t queries = varies ? problem.total_q / problem.batch : problem.seqlen_q;
  return std::min(queries, problem.seqlen_q) * packed_heads(problem);
}

// Products of 8 bits take 32 keys at a time, and P has half the registers.
void choose_byte_tiles(FwdConfig& config, const Problem& problem) {
  const bool widest = std::max(config.d, config.dv) > 192;
  if (widest && walks_plainly(config) && !config.scale_first && problem.kv.seqlen >= 1024) config.tile_kv = 96;
  if (config.tile_q == 192) config.stages = 2;
  if (config.tile_kv == 80) config.tile_kv = 64;
}

}  // namespace

// Chooses the number of consumer groups, of 64 rows each: two, or three if registers allow. It is one, with two or
// three blocks on a multiprocessor, for short causal sequences with narrow heads, if many rows of three groups would be
// unused, and if there are few blocks.
void choose_wgmma_tiles(FwdConfig& config, const Problem& problem, const Target& target) {
  const int widest = std::max(config.d, config.dv);
  const std::int64_t rows = problem.seqlen_q * packed_heads(problem);
  const bool much_to_find = config.compressed_causal || config.chunked || config.segments == 2;
  if (problem.list || config.dropout) {  // tiles of a power of two keys are whole granules of a list
    const bool mask_and_score = config.user_mask && config.linear_score && widest > 64;
    const bool more_than_softmax = config.scale_first || (widest > 64 && config.dropout) || mask_and_score ||
                                   (config.dropout && problem.list) ||
                                   (config.user_mask && (widest > 128 || config.dropout)) ||
                                   (config.skip == Skip::threshold && config.descales_rows());
    set_tile(config, 128, widest > 128 || more_than_softmax ? 64 : 128, 2, 8);
  } else if (config.scale_first || config.user_mask) {
    set_tile(config, 128, widest <= 128 ? 96 : 64, 2, 8);
  } else if (widest <= 64 && !much_to_find) {
    const bool causal = problem.window.right && !problem.window.left;
    set_tile(config, 192, 128, 4, 12);
    // Three groups leave no registers for 128 keys of int8, nor for rounded sums beside linear scores. Boxes of pages
    // must divide a tile.
    const bool few_boxes = config.source == Source::strided || problem.kv.page_size % 96 == 0;
    if (config.int8_scores && few_boxes) set_tile(config, 192, 96, 2, 12);
    const bool two_groups = (config.rounded_sums && config.linear_score) || (config.int8_scores && !few_boxes);
    if (two_groups) set_tile(config, 128, 128, 2, 8);
    const std::int64_t usual = usual_rows(problem);
    const bool mostly_whole = 5 * round_up(usual, std::int64_t{192}) <= 6 * round_up(usual, std::int64_t{64});
    if (causal && rows <= kManyRows / 2) {
      set_tile(config, 64, 64, 4, 4);
    } else if (widest <= 32) {
      set_tile(config, rows <= kManyRows ? 64 : 128, 128, 2, rows <= kManyRows ? 4 : 8);
    } else if (!mostly_whole || count_deciding_blocks(config, problem) < target.multiprocessors) {
      set_tile(config, 64, 128, 2, 4);
    }
  } else {
    // Tiles of 80 keys are for many keys, since few would not fill them. Boxes of pages must divide a tile; with
    // whole_rows they may have 16 keys.
    const bool whole_rows = config.d == problem.head_dim_qk && config.dv == problem.head_dim_v && !config.eight_bits;
    const bool small_boxes = config.source == Source::paged && whole_rows && problem.kv.page_size % 16 == 0;
    const bool divides = config.source == Source::strided || (small_boxes && !problem.kv2);
    const bool has_registers = !config.linear_score || !config.rounded_sums;
    const int beside_most = divides && has_registers && problem.kv.seqlen >= 1024 ? 80 : 64;
    set_tile(config, 128, widest <= 128 ? 128 : widest <= 192 && !much_to_find ? 96 : beside_most, 2, 8);
  }
  const bool few = rows <= 64 || 2 * count_deciding_blocks(config, problem) <= target.multiprocessors;
  if (widest <= 128 && config.tile_q == 128 && few) {
    config.tile_q = 64;
    config.warps = 4;
  }
  // 256 columns of O leave no registers for more.
  if (widest > 192 && (problem.list || config.dropout || much_to_find)) config.tile_kv = 32;
  if (config.multiplies_bytes()) choose_byte_tiles(config, problem);
  if (problem.list) choose_list_tiles(config, problem, packed_heads(problem), config.tile_kv);
}

}  // namespace tessera::cuda
