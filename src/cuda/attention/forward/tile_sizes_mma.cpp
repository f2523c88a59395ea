// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/forward/tile_sizes.h"
#include "cuda/attention/tiles/list_params.h"
#include "cuda/driver/occupancy.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kManyKeys = 2048;

// Returns the most keys of a tile that shared memory and registers leave room for.
int most_keys(const FwdConfig& config) {
  if (config.d > 256) return 32;  // two blocks with 64 rows of 512 columns share the 228 KB of SM90
  // Addresses of mixed sources take registers.
  const bool short_of_registers = config.tile_q > 32 && std::max(config.d, config.dv) > 64;
  return config.source == Source::mixed && short_of_registers ? 32 : 128;
}

// For is_plain() and many rows: 32 rows a warp if O leaves registers for them, because every fragment of K and V then
// serves two products. All of this was measured on an H200: docs/experiments/gpu-forward-mma.md.
void choose_plain_tile(FwdConfig& config, std::int64_t keys, const Target& target) {
  const int widest = std::max(config.d, config.dv);
  if (widest <= 32) return set_tile(config, 64, 96, 1);
  if (widest <= 64) return set_tile(config, 128, 128, 1);
  if (widest <= 96) return set_tile(config, 128, 96, 2);
  if (widest <= 128) return set_tile(config, 128, 64, 2);
  if (keys >= kManyKeys && widest <= 192) return set_tile(config, 64, 96, 1);
  if (keys >= kManyKeys && widest <= 256 && config.dv_parts == 1 && config.panel_bytes() == 128) {
    for (const int tile_kv : {128, 96}) {  // one block a multiprocessor, of 16 rows a warp
      set_tile(config, 128, tile_kv, 1, 8);
      if (config.smem_bytes() <= target.shared_memory) return;
    }
  }
  set_tile(config, 64, 64, 1);
}

// If all blocks of 128 rows run at once, twice as many blocks of 64 rows are 1.05 to 1.3 times as fast. `waves`: of the
// latter, with two blocks for each multiprocessor.
void choose_short_tile(FwdConfig& config, std::int64_t keys, std::int64_t waves) {
  const int widest = std::max(config.d, config.dv);
  if (keys >= (waves == 1 ? 256 : 512)) return set_tile(config, 64, 128, 1);
  if (waves == 1) return set_tile(config, 64, 64, widest <= 64 ? 1 : 2);
  if (widest > 64) set_tile(config, 64, 32, 1);
}

// For other problems: fewer keys if more than the plain softmax needs registers, and fewer rows if there are few, as in
// decoding, because most would be idle.
void choose_other_tile(FwdConfig& config, std::int64_t rows) {
  const int widest = std::max(config.d, config.dv);
  // Tiles are copied 16 rows at a time, or 32 if panels are 64 bytes wide.
  const bool by_32_rows = config.panel_bytes() == 64;
  const bool plain = !config.scale_first && config.source == Source::strided && config.output == config.type;
  if (config.scale_first && config.source == Source::strided && rows > 64) {
    if (widest <= 64) return set_tile(config, 64, 96, 2);
    if (widest <= 128) return set_tile(config, 64, 128, 1);
  }
  config.tile_q = rows <= 32 ? 32 : rows <= 64 || widest > 128 ? 64 : 128;
  config.warps = config.tile_q == 32 ? 2 : 4;
  if (widest <= 64) {
    config.tile_kv = plain ? 128 : by_32_rows ? 96 : 80;
  } else {
    config.tile_kv = plain || config.dv != 128 ? 64 : by_32_rows ? 32 : 48;
  }
  const bool two_stages = widest <= 64 || (widest <= 128 && !config.scale_first);
  config.stages = two_stages && config.source == Source::strided ? 2 : 1;
}

void choose_by_rows(FwdConfig& config, const Problem& problem, const Target& target) {
  const std::int64_t rows = problem.seqlen_q * packed_heads(problem);
  const std::int64_t keys = problem.kv.seqlen;
  const std::int64_t most = 2 * target.multiprocessors;
  if (!is_plain(config) || rows <= 64) {
    choose_other_tile(config, rows);
    const bool halves = config.tile_q == 128 && !problem.list;
    if (halves && 2 * count_deciding_blocks(config, problem) <= most) config.tile_q = 64;
  } else {
    choose_plain_tile(config, keys, target);
    const std::int64_t blocks = count_deciding_blocks(config, problem);
    if (config.tile_q == 128 && config.warps == 4 && blocks <= most) {
      choose_short_tile(config, keys, 2 * blocks <= most ? 1 : 2);
    }
  }
  config.tile_kv = std::min(config.tile_kv, most_keys(config));
  if (config.dropout || config.user_score || config.user_mask) {  // 16 rows a warp: these need registers too
    config.tile_q = std::min(config.tile_q, 64);
    config.tile_kv = std::min(64, most_keys(config));
    if (config.keeps_rests() && config.dv > 128) config.tile_kv = 32;
  }
}

// Reduces stages and keys to what a chip's shared memory holds: 99 KB on SM89 and SM120, 163 on SM80, 227 on SM90 and
// SM100.
void fit_shared_memory(FwdConfig& config, const Problem& problem, const Target& target) {
  if (config.warps <= 4 && blocks_that_fit(config.tiles_end(), target) < 2) {
    config.stages = 1;
    if (!problem.list) config.tile_kv = std::min(config.tile_kv, 96);  // a list's tiles are whole granules of its keys
  }
  if (config.skip != Skip::none && config.smem_bytes() > target.shared_memory) config.stages = 1;
  while (config.skip != Skip::none && config.smem_bytes() > target.shared_memory && config.tile_kv > 32) {
    config.granule = config.tile_kv /= 2;
  }
  // 99 KB hold 64 rows and 16 keys of 512 columns.
  if (config.d > 256 && config.smem_bytes() > target.shared_memory) {
    config.tile_kv = 16;
    config.granule = 16;
  }
}

// Reduces the keys where kernels would need more than the 255 registers of a thread, on any chip or on some.
void fit_registers(FwdConfig& config, const Problem& problem, const Target& target) {
  const bool few_left = target.sm >= 100 || config.rounded_sums;
  if (few_left && config.tile_q == 128 && config.tile_kv == 48) config.tile_kv = 32;
  // Int8 sums become scores by factors of rows and keys, which need registers beside O.
  if (config.int8_scores && config.tile_q == 128 && !problem.list) {
    const int most = config.dv <= 64 || config.warps == 8 ? 96 : config.panel_bytes() == 64 ? 64 : 48;
    config.tile_kv = std::min(config.tile_kv, few_left && config.descales_rows() ? most / 32 * 32 : most);
  }
  // O and its residual are stored together.
  const bool more_than_softmax = config.chunked || config.compressed_causal;
  const bool short_of_them = config.type == Element::fp16 || config.dv <= 64 || more_than_softmax;
  if (config.residual && !problem.list && config.tile_q == 128 && short_of_them) {
    const bool half = config.compressed_causal || (config.type == Element::fp16 && config.dv <= 64);
    const int step = config.panel_bytes() == 64 ? 32 : 16;  // rows that the block's threads copy at a time
    config.tile_kv = (half ? config.tile_kv / 2 : config.tile_kv * 3 / 4) / step * step;
  }
  // Chunks are computed from 64-bit positions, which takes a few more registers. The tiles of a list stay, because they
  // are whole granules of its keys.
  const bool tight = config.tile_q == 128 && target.sm >= 90 && target.sm < 120;
  if (!config.chunked || !tight || problem.list) return;
  const int widest = std::max(config.d, config.dv);
  if (widest <= 64) config.tile_kv = std::min(config.tile_kv, 96);
  if (widest == 128 && config.d == config.dv) config.tile_kv = std::min(config.tile_kv, 48);
}

}  // namespace

void choose_mma_tiles(FwdConfig& config, const Problem& problem, const Target& target) {
  choose_by_rows(config, problem, target);
  if (problem.list) choose_list_tiles(config, problem, packed_heads(problem), most_keys(config));
  fit_shared_memory(config, problem, target);
  fit_registers(config, problem, target);
}

}  // namespace tessera::cuda
