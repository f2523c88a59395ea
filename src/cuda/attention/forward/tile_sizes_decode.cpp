// SPDX-License-Identifier: Apache-2.0
// Tiles, loader and splits of the forward for few rows (attention/decode). They keep memory busy from the first block
// to the last. docs/kernels.md, section 13, has the measurements on an H200.
#include <algorithm>
#include <limits>
#include <optional>

#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/forward/tile_sizes.h"
#include "cuda/attention/kv/tensor_map.h"
#include "cuda/attention/params.h"
#include "cuda/attention/splits/partials.h"
#include "cuda/driver/occupancy.h"

namespace tessera::cuda {
namespace {

// The cost of a block's beginning and end, as bytes that its share of the memory bandwidth transfers in that time:
// about 1.5 µs at 16 KB per µs.
constexpr std::int64_t kBeginning = std::int64_t{24} << 10;
// The same for merging splits: the wait for the last split, and what each split adds.
constexpr std::int64_t kMerging = std::int64_t{16} << 10;
constexpr std::int64_t kMergingOne = 512;
// Bounds of a block's bytes of the longest possible sequence, if lengths are known at run time only. The first keeps
// long sequences from ending much later than others. Within these bounds there is at least a wave of blocks.
constexpr std::int64_t kMostOfLengths = std::int64_t{2} << 20;
constexpr std::int64_t kLeastOfLengths = std::int64_t{256} << 10;  // twice as many with 8 bits: their keys take as long
// The fewest tiles for each of eight warps that share a block.
constexpr std::int64_t kTilesOfEight = 8;
constexpr std::int64_t kMostSplits = 256;
constexpr std::int64_t kMostParts = 65535;  // splits of all sequences
constexpr std::int64_t kMostBytesOfParts = std::int64_t{256} << 20;

// Two blocks share a multiprocessor: while one begins or ends, the other reads. A block has most_warps warps, or half
// or a quarter of them if memory does not hold two tiles for each of more. The ring is as deep as fits, up to 4 stages.
void choose_ring(FwdConfig& config, const Target& target, int most_warps) {
  for (config.warps = most_warps; config.warps >= 1; config.warps /= 2) {
    for (config.stages = 4; config.stages >= 2; --config.stages) {
      if (config.ring_bytes() < config.warp_part_bytes()) break;
      if (blocks_that_fit(config.smem_bytes(), target) >= 2) return;
    }
  }
  config.warps = most_warps;
  config.stages = 2;
  while (config.ring_bytes() < config.warp_part_bytes()) ++config.stages;
}

// Returns how many keys a sequence's rows see at most, by capacities, the window and chunks.
std::int64_t most_keys_seen(const Problem& problem) {
  const std::int64_t far = std::int64_t{1} << 30;
  const auto side = [far](const std::optional<std::int64_t>& s) { return std::clamp(s.value_or(far), -far, far); };
  const std::int64_t window = side(problem.window.left) + side(problem.window.right) + problem.seqlen_q;
  const std::int64_t chunks = problem.chunk == 0 ? far : std::min(problem.chunk, far) + problem.seqlen_q;
  return std::clamp<std::int64_t>(std::min(window, chunks), 1, std::max<std::int64_t>(count_keys(problem), 1));
}

bool knows_lengths(const Problem& problem) {
  const auto dense = [](const KvSource& source) { return source.layout == KvLayout::dense && !source.seqused; };
  return dense(problem.kv) && (!problem.kv2 || dense(*problem.kv2));
}

// Returns the splits that fill at least 90% of a wave with one block for each multiprocessor; 0 if there are none. On
// an H200, for few sequences, such a wave of blocks with twice the warps takes 0 to 15% less time than two blocks for
// each multiprocessor.
std::int64_t splits_of_one_wave(const FwdConfig& config, const Problem& problem, const Target& target) {
  const std::int64_t blocks = count_blocks(config, problem, 1);
  // Bits of results depend on the number of warps, which with batch_invariant must not depend on the batch.
  if (blocks == 0 || blocks > target.multiprocessors || !knows_lengths(problem) || problem.batch_invariant) return 0;
  const std::int64_t splits = target.multiprocessors / blocks;
  const std::int64_t tiles = divide_up<std::int64_t>(most_keys_seen(problem), config.tile_kv);
  const bool fills = blocks * splits * 10 >= std::int64_t{target.multiprocessors} * 9;
  const bool can = splits == 1 || (!problem.residual && splits <= std::min(tiles / 4, kMostSplits));
  return fills && can ? splits : 0;
}

}  // namespace

bool has_decode_tma(const FwdConfig& config, const Problem& problem, const Target& target) {
  if (target.sm < 90 || config.segments != 1 || config.source == Source::mixed) return false;
  return config.panel_bytes() == 128 || box_rows(config, problem.kv) % 2 == 0;
}

void choose_decode_tiles(FwdConfig& config, const Problem& problem, const Target& target) {
  const int widest = std::max(config.d, config.dv);
  const bool plain = !config.dropout && !config.user_score && !config.user_mask;
  config.tile_q = problem.seqlen_q * packed_heads(problem) > 16 && widest <= 128 ? 32 : 16;
  config.tile_kv = 32;
  // TMA loads tiles that are contiguous, because its boxes should be large: 32 rows.
  const bool together = box_rows(config, problem.kv) == config.tile_kv;
  const bool by_tma = together && plain && target.sm < 120 && has_decode_tma(config, problem, target);
  config.loader = by_tma ? Loader::tma : Loader::cp_async;
  if (widest * bytes_of(config.k_type()) > 128 && !by_tma) config.tile_kv = 16;
  if (widest > 128) config.tile_kv = 16;
  if (config.tile_q == 16 && widest <= 128) config.q_kept = config.d;
  choose_ring(config, target, 4);
  if (!by_tma || config.warps == 1) return;
  const std::int64_t splits = splits_of_one_wave(config, problem, target);
  const std::int64_t tiles = divide_up<std::int64_t>(most_keys_seen(problem), config.tile_kv);
  if (splits > 0 && (config.warps == 2 || tiles >= splits * 8 * kTilesOfEight)) config.warps *= 2;
}

// Returns the fewest splits with which the waves of blocks take the least time. The blocks of a partial last wave are
// faster, but not in proportion to their smaller number.
std::int64_t choose_decode_splits(const FwdConfig& config, const Problem& problem, const Target& target) {
  const std::int64_t blocks = count_blocks(config, problem, 1);
  const std::int64_t tiles = divide_up<std::int64_t>(most_keys_seen(problem), config.tile_kv);
  if (blocks == 0) return 1;
  const std::int64_t tile_bytes = config.k_bytes() + config.v_bytes();
  const std::int64_t fit = std::clamp(blocks_that_fit(config.smem_bytes(), target), 1, config.blocks());
  const std::int64_t places = fit * target.multiprocessors;
  const auto bytes = static_cast<std::int64_t>(Partials(problem, 1).bytes());
  const std::int64_t room = std::min({kMostSplits, kMostParts / std::max<std::int64_t>(problem.batch, 1),
                                      kMostBytesOfParts / std::max<std::int64_t>(bytes, 1)});
  const std::int64_t most = std::clamp<std::int64_t>(std::min(tiles / config.warps, room), 1, kMostSplits);
  std::int64_t least = 1;
  if (!knows_lengths(problem)) {
    const std::int64_t wanted = std::max(divide_up(places, blocks), divide_up(tiles * tile_bytes, kMostOfLengths));
    const std::int64_t least_bytes = config.eight_bits ? 2 * kLeastOfLengths : kLeastOfLengths;
    least = std::clamp<std::int64_t>(wanted, 1, std::clamp<std::int64_t>(tiles * tile_bytes / least_bytes, 1, most));
  }
  const bool one_wave = fit == 1 && config.uses_tma() && config.warps >= 4;
  if (const std::int64_t splits = one_wave ? splits_of_one_wave(config, problem, target) : 0; splits > 0) return splits;
  std::int64_t best = least;
  std::int64_t best_cost = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t splits = least; splits <= most; ++splits) {
    const std::int64_t of_block = (tiles + splits - 1) / splits * tile_bytes;
    const std::int64_t whole = blocks * splits / places;
    const std::int64_t rest = blocks * splits % places;
    const std::int64_t of_rest = rest == 0 ? 0 : kBeginning + of_block * (rest + places) / (2 * places);
    const std::int64_t merging = splits > 1 ? kMerging + splits * kMergingOne : 0;
    const std::int64_t cost = whole * (of_block + kBeginning) + of_rest + merging;
    if (cost < best_cost) best_cost = cost, best = splits;
  }
  return best;
}

}  // namespace tessera::cuda
