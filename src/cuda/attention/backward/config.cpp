// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/config.h"

#include <algorithm>

#include "cuda/attention/backward/lists/list_bits.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/masks/mask_tiles.h"
#include "cuda/attention/scores/callable_source.h"
#include "cuda/driver/occupancy.h"
#include "cuda/jit/element.h"

namespace tessera::cuda {
namespace {

// Head dims that have kernels. Others are padded to the next of them.
int padded_dim(std::int64_t dim) {
  for (const int size : {32, 64, 96, 128, 192}) {
    if (dim <= size) return size;
  }
  return 256;
}

bool has_fixed_order(const Problem& problem) { return problem.deterministic || problem.batch_invariant; }

void choose_list(BwdConfig& config, const Problem& problem) {
  const TileList& list = backward_list(problem);
  if (!list) return;
  config.tiles = Tiles::list;
  config.truncates = bool{problem.bwd_list};
}

// Whether a tile of the kernel can hold rows, or keys, of two blocks of the list. A block that covers the whole
// sequence has no neighbour.
bool cuts_rows(const Problem& problem, int tile_q) {
  return problem.block_q % tile_q != 0 && problem.block_q < problem.seqlen_q;
}
bool cuts_keys(const Problem& problem, int tile_kv) {
  const std::int64_t keys = problem.kv2 ? std::max(problem.kv.seqlen, problem.kv2->seqlen) : problem.kv.seqlen;
  return problem.block_kv % tile_kv != 0 && problem.block_kv < keys;
}

// Called once tiles are chosen: list_elements says that a tile may have elements that are listed and others that are
// not.
void choose_list_tests(BwdConfig& config, const Problem& problem) {
  if (!config.has_list()) return;
  config.list_elements =
      config.list_elements || cuts_rows(problem, config.tile_queries()) || cuts_keys(problem, config.tile_kv);
  config.list_waives = config.user_mask && backward_list(problem).full && !config.list_elements;
}

void choose_features(BwdConfig& config, const Problem& problem) {
  config.type = element_of(problem.q_type);
  config.gradient = problem.grad_fp32 ? Element::fp32 : config.type;
  config.d = padded_dim(problem.head_dim_qk);
  config.dv = padded_dim(problem.head_dim_v);
  config.segments = problem.kv2 ? 2 : 1;
  config.compressed_causal = problem.compressed_causal.has_value();
  config.chunked = problem.chunk > 0;
  // One form of tanh is enough, because both differ by less than the rounding of the gradient.
  config.softcap = problem.softcap > 0.0F ? Softcap::rational : Softcap::none;
  config.alibi = problem.alibi;
  config.sink = problem.sink;
  config.dropout = problem.dropout > 0.0F;
  config.user_score = !problem.score.empty();
  config.additive_score = config.softcap == Softcap::none && has_additive_score(problem);
  config.user_mask = !problem.mask.empty();
  choose_list(config, problem);
  config.scale_first =
      config.softcap != Softcap::none || config.alibi || config.user_score || !(problem.softmax_scale() > 0.0F);
}

// Called once tiles are chosen. Bits that an earlier kernel has computed replace the user's mask.
void choose_mask_bits(BwdConfig& config, const Problem& problem) {
  const bool divides = kMaskBlock % config.tile_q == 0 && kMaskBlock % config.tile_kv == 0;
  config.mask_bits = config.adds_dq() && divides && config.heads_a_tile == 1 && config.segments == 1 &&
                     !config.list_elements && !problem.bwd_list && has_mask_bits(problem);
  if (config.mask_bits) config.user_mask = false;
}

bool has_plain_scores(const BwdConfig& config) {
  return !config.scale_first && !config.dropout && !config.list_elements;
}
bool has_plain_intervals(const BwdConfig& config) { return !config.chunked && !config.compressed_causal; }
bool is_plain(const BwdConfig& config) {
  return has_plain_scores(config) && has_plain_intervals(config) && !config.user_mask;
}

// Returns how many query heads a tile must pack, so that its queries lie in one block of the list; 0 if no number of
// heads achieves that.
int heads_of_tile(const Problem& problem, int rows) {
  const std::int64_t heads =
      backward_list(problem).heads == TileList::Heads::q ? 1 : problem.heads_q / problem.heads_kv;
  for (int packed = 1; packed <= std::min(rows, kSumRows) && heads % packed == 0; packed *= 2) {
    if (!cuts_rows(problem, rows / packed)) return packed;
  }
  return 0;
}

// Chooses, for Gradients::all, the largest tiles that fit registers and shared memory and that blocks of a list do not
// cut. Returns whether there are any. `may_pack`: a tile may have rows of several heads, if blocks have fewer queries
// than a tile has rows.
bool choose_tiles_of_all_mma(BwdConfig& config, const Problem& problem, const Target& target, bool may_pack) {
  // A user's mask needs registers too, and so do the bounds of chunks and of compressed keys.
  const bool wants_registers = config.user_mask || config.mask_bits || config.compressed_causal ||
                               (config.has_list() && (config.scale_first || target.sm >= 100));
  const int most_accumulators = config.chunked ? 152 : wants_registers ? 184 : 192;
  struct Tiles {
    int rows, keys, stages;
    int packed_blocks = 0;   // if not 0: only for packed rows, and only if a multiprocessor holds so many
    bool single_ov = false;  // dO has one stage
  };
  // For packed rows, two blocks of four warps are better than one of eight: one computes while the other waits at a
  // barrier.
  for (const auto& [rows, keys, stages, packed_blocks, single_ov] : {Tiles{128, 128, 2},
                                                                     {64, 128, 2},
                                                                     {32, 64, 2, 2},
                                                                     {64, 64, 2},
                                                                     {64, 64, 2, 0, true},
                                                                     {64, 64, 1},
                                                                     {32, 64, 2}}) {
    config.tile_q = rows;
    config.tile_kv = keys;
    config.stages = stages;
    config.single_ov = single_ov;
    if (config.has_list()) {
      config.heads_a_tile = heads_of_tile(problem, rows);
      if (config.heads_a_tile == 0 || (config.heads_a_tile > 1 && !may_pack) || cuts_keys(problem, keys)) continue;
    }
    // These kernels would spill: 128 rows with a sink, with scale_first, with packed heads, or from SM100 on; and two
    // stages of dO with more than 128 columns.
    const bool packs = config.heads_a_tile > 1;
    if (rows == 128 && (config.sink || config.scale_first || packs || target.sm >= 100)) continue;
    if (packed_blocks > 0 && !packs) continue;
    if (stages == 2 && !single_ov && std::max(config.d, config.dv) > 128) continue;
    for (const int warps : {8, 4}) {
      config.warps = warps;
      if (config.shares_columns() && config.accumulators() <= most_accumulators &&
          blocks_that_fit(config.smem_bytes(), target) >= std::max(packed_blocks, 1)) {
        return true;
      }
    }
  }
  config.heads_a_tile = 1;
  return false;
}
bool choose_tiles_of_all_mma(BwdConfig& config, const Problem& problem, const Target& target) {
  return choose_tiles_of_all_mma(config, problem, target, false) ||
         (config.has_list() && cuts_rows(problem, 32) && !config.scale_first &&
          choose_tiles_of_all_mma(config, problem, target, true));
}

// Each warp has 16 rows of the block's own tile. A streamed tile has 64 rows if registers allow it and two blocks fit a
// multiprocessor, otherwise 32 if one block fits, otherwise `least`.
void choose_tiles_mma(BwdConfig& config, const Target& target) {
  const bool queries = config.keeps_queries();
  config.warps = 4;
  config.stages = 2;
  (queries ? config.tile_q : config.tile_kv) = 16 * config.warps;
  int& stream = queries ? config.tile_kv : config.tile_q;
  const int widest = std::max(config.d, config.dv);
  config.apart = !queries && widest > 128;
  // Tiles are copied 16 rows at a time, or 32 if their rows are cut into panels of 32 columns.
  const int least = config.d % 64 != 0 || config.dv % 64 != 0 ? 32 : 16;
  const int most_accumulators = is_plain(config) ? 168 : config.user_score ? 112 : 144;  // user code needs registers
  for (stream = 64; stream > least; stream /= 2) {
    const int blocks = stream > 32 ? 2 : 1;
    if (config.accumulators() <= most_accumulators && blocks_that_fit(config.smem_bytes(), target) >= blocks) return;
  }
}

// Each warpgroup has 64 rows of the block's own tile. Streamed tiles are as long as registers and two stages in shared
// memory allow; then they get as many stages as fit, up to four. Besides the accumulators, masks and dropout need
// registers. So tiles of more than 64 rows are for the row pass without dropout, and tiles of 128 rows also for
// Gradients::all without dropout and scale_first. The row pass needs V for dP alone: V has a single stage if that makes
// tiles longer, unless they would cut a list's blocks.
void choose_tiles_wgmma(BwdConfig& config, const Problem& problem, const Target& target) {
  const bool queries = config.keeps_queries();
  // A list with blocks of 64 gets own tiles of 64: one warpgroup, and two blocks on a multiprocessor. A product of 256
  // columns needs more registers than such blocks begin with.
  const int widest = std::max(config.d, config.dv);
  const bool wide = widest > 128;
  // With keeps_chain(), the warpgroups would have to exchange the values of the chain rule, too.
  config.roles = !queries && wide && !config.keeps_chain();
  config.apart = !queries && wide && !config.roles;
  const bool is_short_own = config.has_list() && !config.adds_dq() && !config.roles && widest <= 192 &&
                            (queries ? cuts_rows(problem, 128) : cuts_keys(problem, 128));
  config.warps = is_short_own ? 4 : 8;
  (queries ? config.tile_q : config.tile_kv) = config.roles ? 64 : 16 * config.warps;
  int& stream = queries ? config.tile_kv : config.tile_q;
  const bool plain = is_plain(config);
  const int most_queries = wide ? (plain ? 176 : 160) : plain ? 160 : 144;
  const bool many_tests = config.alibi && config.user_mask;
  const int most_keys =
      (config.roles && !many_tests) || (plain && config.segments == 1) || config.adds_dq() ? 192 : 160;
  const int most_accumulators = queries ? most_queries : most_keys;
  const auto cuts_stream = [&](int length) {
    if (config.truncates && queries && length > 64) return true;  // `truncates` needs registers for its test
    return queries ? cuts_keys(problem, length) : cuts_rows(problem, length);
  };
  const bool takes_128 = config.adds_dq() && !config.scale_first && !config.dropout;
  config.stages = 2;
  const auto try_tiles = [&](int length, bool single_ov) {
    const bool may_be_cut = !single_ov && (length == 64 || length == 32);
    if (config.has_list() && cuts_stream(length) && !may_be_cut) return false;
    stream = length;
    config.single_ov = single_ov;
    const bool is_short = length <= 64 || (queries && !config.dropout) || (takes_128 && length == 128);
    return is_short && config.accumulators() <= (single_ov ? 192 : most_accumulators) &&
           blocks_that_fit(config.smem_bytes(), target) >= config.blocks();
  };
  const bool may_have_single_ov = queries && wide && plain && config.segments == 1;
  for (const int length : {128, 96, 64, 48, 32}) {
    if (try_tiles(length, false) || (may_have_single_ov && try_tiles(length, true))) break;
  }
  for (config.stages = 4; config.stages > 2 && blocks_that_fit(config.smem_bytes(), target) < config.blocks();)
    --config.stages;
}

}  // namespace

BwdConfig bwd_config(const Problem& problem, const Target& target, Products products, Gradients of) {
  BwdConfig config;
  config.of = of;
  config.products = products;
  config.ordered = of == Gradients::all && has_fixed_order(problem);
  choose_features(config, problem);
  const auto choose_tiles = [&] {
    if (products == Products::wgmma) {
      choose_tiles_wgmma(config, problem, target);
    } else if (config.adds_dq()) {
      choose_tiles_of_all_mma(config, problem, target);
    } else {
      choose_tiles_mma(config, target);
    }
  };
  choose_tiles();
  choose_list_tests(config, problem);
  if (config.list_elements) choose_tiles();  // tests need registers; list_elements stays set, whatever tiles follow
  choose_mask_bits(config, problem);
  return config;
}

// Four blocks for each multiprocessor even out the different work that masks leave to them. A part should take much
// longer than the transfer of its sums through memory.
std::int64_t choose_row_parts(const Problem& problem, const BwdConfig& config, const Target& target) {
  const std::int64_t key_tiles = divide_up<std::int64_t>(problem.kv.seqlen, config.tile_kv);
  const std::int64_t blocks = key_tiles * problem.heads_kv * problem.batch;
  if (!config.may_split_rows() || blocks == 0 || blocks >= target.multiprocessors || problem.batch_invariant) return 1;
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  const std::int64_t rows = divide_up<std::int64_t>(problem.seqlen_q, config.tile_q) * group;
  return std::clamp<std::int64_t>(rows / kLeastPart, 1, 4 * target.multiprocessors / blocks);
}

namespace {

// Chooses how many heads run side by side with ordered sums, where each block adds to a tile of rows after the block
// with the preceding keys. If fewer blocks of a head run side by side, they wait less for each other at the start of
// their walks, but share less of what they read and add to in L2. The best number measured is the geometric mean of the
// heads that fit L2 and of tile_q / 2. If the blocks of all keys have the same rows, they wait in the first wave only:
// then it is the mean with tile_q / 8, and at most the heads of two waves of blocks (docs/experiments/gpu-backward.md).
// Returns the divisor of `heads` whose ratio to that number is nearest to 1. `bytes`: of a head; `wave`: heads whose
// blocks run at once.
std::int64_t ordered_l2_heads(const Problem& problem, const BwdConfig& keys, std::int64_t heads, std::int64_t bytes,
                              double wave) {
  const bool rows_differ =
      problem.window.left || problem.window.right || problem.compressed_causal || problem.chunk > 0;
  const double fit = static_cast<double>(kL2GroupBytes) / static_cast<double>(bytes);
  double squared = static_cast<double>(keys.tile_q / (rows_differ ? 2 : 8)) * fit;
  if (!rows_differ) squared = std::min(squared, 4 * wave * wave);
  std::int64_t nearest = 1;
  const auto ratio = [squared](std::int64_t to) {
    const double quotient = static_cast<double>(to * to) / squared;
    return std::max(quotient, 1 / quotient);
  };
  for (std::int64_t small = 1; small * small <= heads; ++small) {
    if (heads % small != 0) continue;
    for (const std::int64_t divisor : {small, heads / small}) {
      const bool is_nearer = ratio(divisor) < ratio(nearest) || (ratio(divisor) == ratio(nearest) && divisor > nearest);
      if (is_nearer) nearest = divisor;
    }
  }
  return nearest;
}

}  // namespace

// Chooses the number of key heads in an L2 group, whose blocks run side by side, so that the streamed rows and the sums
// of dQ stay in L2. It divides the number of all heads, so that groups are equal. A group has about the heads of a wave
// or more, because these run side by side in any case: with one head after another, the long first blocks of the last
// head would begin when other multiprocessors have nothing left to do. If waves walk in serpentine order
// (KeySide::find_walk), as with compressed keys, a group has the heads of a wave.
std::int64_t key_l2_heads(const Problem& problem, const BwdConfig& keys, std::int64_t key_tiles, int multiprocessors) {
  const std::int64_t heads = std::max<std::int64_t>(problem.heads_kv * problem.batch, 1);
  const std::int64_t row_bytes = keys.row_bytes() + (keys.adds_dq() ? keys.d * 4 : 0);
  const std::int64_t bytes =
      std::max<std::int64_t>(problem.seqlen_q * (problem.heads_q / problem.heads_kv) * row_bytes, 1);
  if (keys.ordered)
    return ordered_l2_heads(problem, keys, heads, bytes, multiprocessors / static_cast<double>(key_tiles));
  const std::int64_t wave = multiprocessors / key_tiles;
  const std::int64_t most = keys.walks_serpentine() ? wave : std::max(kL2GroupBytes / bytes, wave);
  std::int64_t together = std::clamp<std::int64_t>(most, 1, heads);
  while (heads % together != 0) --together;
  return together;
}

bool finds_all(const Problem& problem, const Target& target, Products products) {
  // With wgmma, ordered blocks take turns; with a list, the order of turns would require the inverse of the list.
  if (has_fixed_order(problem) && (products != Products::wgmma || backward_list(problem))) return false;
  BwdConfig config = bwd_config(problem, target, products, Gradients::all);
  if (config.d == 32 || config.list_elements || config.segments != 1) return false;
  if (products == Products::mma_sync) {
    return !config.dropout && !config.keeps_chain() && choose_tiles_of_all_mma(config, problem, target);
  }
  // With dropout and d + dv above 192, no registers are left for tiles of a list, nor for scores and masks that need
  // many.
  const bool needs_many =
      config.has_list() || (config.scale_first && (config.user_mask || !has_plain_intervals(config)));
  if (config.dropout && needs_many && config.d + config.dv > 192) return false;
  const int widest = std::max(config.d, config.dv);
  return widest <= 128 && config.stream_rows() >= 64 && blocks_that_fit(config.smem_bytes(), target) > 0;
}

bool prefers_mma(const Problem& problem, const Target& target) {
  return backward_list(problem) && cuts_rows(problem, 64) && finds_all(problem, target, Products::mma_sync);
}

RowValuesConfig row_values_config(const Problem& problem, const BwdConfig& keys) {
  const bool sums = keys.adds_dq();
  return {element_of(problem.q_type),
          padded_dim(problem.head_dim_v),
          sums && !keys.ordered ? kSumRows : 0,
          keys.ordered,
          problem.sink,
          keys.has_list() || keys.splits_rows,
          problem.residual,
          keys.heads_a_tile};
}

}  // namespace tessera::cuda
