// SPDX-License-Identifier: Apache-2.0
#include "cuda/fwd_config.h"

#include <algorithm>
#include <numeric>

#include "cuda/element.h"
#include "cuda/list_params.h"
#include "cuda/tile_mass.h"

namespace tessera::cuda {
namespace {

// Keys and values of the heads whose blocks run side by side, at most: a third of the L2 of an H200 (50 MB). 32 and 64
// MB are up to 5% slower.
constexpr std::int64_t kSectionBytes = std::int64_t{16} << 20;
constexpr std::int64_t kManyKeys = 2048;
constexpr std::int64_t kManyRows = 2048;

bool is_paged(const KvSource& source) {
  return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
}

Source source_of(const Problem& problem) {
  if (problem.kv2 && is_paged(problem.kv) != is_paged(*problem.kv2)) return Source::mixed;
  return is_paged(problem.kv) ? Source::paged : Source::strided;
}

std::int64_t keys_of(const Problem& problem) { return problem.kv.seqlen + (problem.kv2 ? problem.kv2->seqlen : 0); }

// Head dims that have configurations of their own; others run padded to the next.
int padded_dim(std::int64_t dim) {
  for (const int size : {32, 64, 96, 128, 192, 256, 384}) {
    if (dim <= size) return size;
  }
  return 512;
}

// 16 rows of more than 256 columns of O do not fit a warp's registers: two blocks share them.
void choose_dims(FwdConfig& config, const Problem& problem) {
  config.d = padded_dim(problem.head_dim_qk);
  const int dv = padded_dim(problem.head_dim_v);
  config.dv_parts = dv > 256 ? 2 : 1;
  config.dv = dv / config.dv_parts;
  if (config.d > 256) config.dv = round_up(config.dv, 64);  // whole panels: copies then go by 16 rows
}

// Keys of a tile, where little room leaves but few.
int most_keys(const FwdConfig& config) {
  if (config.d > 256) return 32;  // with 64 rows of 512 columns two blocks share the 228 KB of SM90
  // Addresses of mixed sources take registers.
  const bool short_of_registers = config.tile_m > 32 && std::max(config.d, config.dv) > 64;
  return config.source == Source::mixed && short_of_registers ? 32 : 128;
}

void set_tile(FwdConfig& config, int tile_m, int tile_n, int stages, int warps = 4) {
  config.tile_m = tile_m;
  config.tile_n = tile_n;
  config.stages = stages;
  config.warps = warps;
}

// For the plainest softmax of many rows: 32 rows a warp wherever O's registers leave room for them, because every
// fragment of K and V then serves two products. All figures here are an H200's:
// docs/experiments/gpu-forward-mma.md.
void choose_plain_tile(FwdConfig& config, std::int64_t keys, const Target& target) {
  const int widest = std::max(config.d, config.dv);
  if (widest <= 32) return set_tile(config, 64, 96, 1);
  if (widest <= 64) return set_tile(config, 128, 128, 1);
  if (widest <= 96) return set_tile(config, 128, 96, 2);
  if (widest <= 128) return set_tile(config, 128, 64, 2);
  if (keys >= kManyKeys && widest <= 192) return set_tile(config, 64, 96, 1);
  if (keys >= kManyKeys && widest <= 256 && config.dv_parts == 1 && config.d % 64 == 0 && config.dv % 64 == 0) {
    for (const int tile_n : {128, 96}) {  // one block a multiprocessor, of 16 rows a warp
      set_tile(config, 128, tile_n, 1, 8);
      if (config.smem_bytes() <= target.shared_memory) return;
    }
  }
  set_tile(config, 64, 64, 1);
}

// For as many blocks as run at once, or fewer: twice as many of half the rows are 1.05 to 1.3 times as fast.
void choose_short_tile(FwdConfig& config, std::int64_t keys, std::int64_t waves) {
  const int widest = std::max(config.d, config.dv);
  if (keys >= (waves == 1 ? 256 : 512)) return set_tile(config, 64, 128, 1);
  if (waves == 1) return set_tile(config, 64, 64, widest <= 64 ? 1 : 2);
  if (widest > 64) set_tile(config, 64, 32, 1);
}

// Narrower tiles where more than the plainest softmax needs registers too, shorter ones where there are few rows: most
// would be idle, as when decoding.
void choose_other_tile(FwdConfig& config, std::int64_t rows) {
  const int widest = std::max(config.d, config.dv);
  // Copies go by 16 rows, by 32 where a row is cut into panels of 32 columns.
  const bool by_32_rows = config.d % 64 != 0 || config.dv % 64 != 0;
  const bool plain = !config.scale_first && config.source == Source::strided && config.output == config.type;
  if (config.scale_first && config.source == Source::strided && rows > 64) {
    if (widest <= 64) return set_tile(config, 64, 96, 2);
    if (widest <= 128) return set_tile(config, 64, 128, 1);
  }
  config.tile_m = rows <= 32 ? 32 : rows <= 64 || widest > 128 ? 64 : 128;
  config.warps = config.tile_m == 32 ? 2 : 4;
  if (widest <= 64) {
    config.tile_n = plain ? 128 : by_32_rows ? 96 : 80;
  } else {
    config.tile_n = plain || config.dv != 128 ? 64 : by_32_rows ? 32 : 48;
  }
  const bool two_stages = widest <= 64 || (widest <= 128 && !config.scale_first);
  config.stages = two_stages && config.source == Source::strided ? 2 : 1;
}

// One source of rows at strides, a range of tiles, outputs of the inputs' type, no callables; scores may be capped or
// biased.
bool walks_plainly(const FwdConfig& config) {
  return config.source == Source::strided && config.tiles == Tiles::range && config.segments == 1 &&
         config.output == config.type && !config.affine && !config.chunked && !config.dropout && !config.user_score &&
         !config.user_mask;
}

bool is_plain(const FwdConfig& config) { return walks_plainly(config) && !config.scale_first; }

std::int64_t row_tiles(const FwdConfig& config, const Problem& problem) {
  return (problem.seqlen_q * packed_heads(problem) + config.tile_m - 1) / config.tile_m;
}

// Heads, or groups of them whose rows are packed.
std::int64_t count_heads(const Problem& problem) { return problem.heads_q / packed_heads(problem); }

// scale · s − origin in one operation is off by what scale · max was rounded by: past 2^30 that is more than the powers
// of two have room for. Large scales are not fused; large q and k with a small one remain (docs/semantics.md).
constexpr float kLargestFusedScale = 1024.0F;

// A rounding of a cap as small as these is less than what probabilities are rounded by; not so if a callable multiplies
// it.
constexpr float kLeastExponentialCap = 1.0F / 1024;
constexpr float kLargestExponentialCap = 64.0F;

Softcap softcap_of(const Problem& problem) {
  if (!(problem.softcap > 0.0F)) return Softcap::none;
  const bool moderate = problem.softcap >= kLeastExponentialCap && problem.softcap <= kLargestExponentialCap;
  return moderate && problem.score.empty() ? Softcap::exponential : Softcap::rational;
}

FwdConfig features_of(const Problem& problem, std::int64_t splits) {
  FwdConfig config;
  config.type = element_of(problem.q_type);
  config.output = splits > 1 ? Element::fp32 : element_of(problem.o_type);
  choose_dims(config, problem);
  config.source = source_of(problem);
  config.segments = problem.kv2 ? 2 : 1;
  config.tiles = problem.list ? Tiles::list : Tiles::range;
  config.trusts =
      problem.metadata == Metadata::trust && (config.source != Source::strided || config.tiles == Tiles::list);
  config.affine = problem.affine.has_value();
  config.chunked = problem.chunk > 0;
  config.softcap = softcap_of(problem);
  config.alibi = problem.alibi;
  config.dropout = problem.dropout > 0.0F;
  config.rounded_sums = problem.o_type == DType::fp32;  // not by partial results of 16-bit outputs
  config.user_score = !problem.score.empty();
  config.user_mask = !problem.mask.empty();
  const float scale = problem.softmax_scale();
  config.scale_first = config.softcap != Softcap::none || config.alibi || config.user_score || !(scale > 0.0F) ||
                       scale > kLargestFusedScale;
  return config;
}

// Of 128 rows, as far as they may decide: not the number of sequences where that must change no bit.
std::int64_t blocks_that_count(const FwdConfig& config, const Problem& problem) {
  const std::int64_t blocks = count_blocks(config, problem, 1);
  return problem.batch_invariant && problem.batch > 0 ? blocks / problem.batch : blocks;
}

void choose_tile(FwdConfig& config, const Problem& problem, const Target& target) {
  const std::int64_t rows = problem.seqlen_q * packed_heads(problem);
  const std::int64_t keys = problem.kv.seqlen;
  const std::int64_t most = 2 * target.multiprocessors;
  if (!is_plain(config) || rows <= 64) {
    choose_other_tile(config, rows);
    const bool halves = config.tile_m == 128 && !problem.list;
    if (halves && 2 * blocks_that_count(config, problem) <= most) config.tile_m = 64;
  } else {
    choose_plain_tile(config, keys, target);
    const std::int64_t blocks = blocks_that_count(config, problem);
    if (config.tile_m == 128 && config.warps == 4 && blocks <= most) {
      choose_short_tile(config, keys, 2 * blocks <= most ? 1 : 2);
    }
  }
  config.tile_n = std::min(config.tile_n, most_keys(config));
  if (config.dropout || config.user_score || config.user_mask) {  // 16 rows a warp: these need registers too
    config.tile_m = std::min(config.tile_m, 64);
    config.tile_n = std::min(64, most_keys(config));
    if (config.keeps_rests() && config.dv > 128) config.tile_n = 32;
  }
}

// Packed rows of a sequence: the mean, unless the batch may not decide.
std::int64_t usual_rows(const Problem& problem) {
  const bool varies = problem.q_layout == Layout::varlen && !problem.batch_invariant && problem.batch > 0;
  const std::int64_t queries = varies ? problem.total_q / problem.batch : problem.seqlen_q;
  return std::min(queries, problem.seqlen_q) * packed_heads(problem);
}

// Groups of 64 rows: two, or three where registers leave room; but one, and two blocks a multiprocessor or three, for
// short causal sequences of narrow heads, where many of three groups' rows would not be used, and where there are few.
void choose_wgmma_tile(FwdConfig& config, const Problem& problem, const Target& target) {
  const int widest = std::max(config.d, config.dv);
  const std::int64_t rows = problem.seqlen_q * packed_heads(problem);
  const bool much_to_find = config.affine || config.chunked || config.segments == 2;
  if (problem.list || config.dropout) {  // a list's runs make whole tiles if their length is a power of two
    const bool more_than_softmax = (config.dropout && widest > 64) || config.scale_first || config.user_mask;
    set_tile(config, 128, widest > 128 || more_than_softmax ? 64 : 128, 2, 8);
  } else if (config.scale_first || config.user_mask) {
    set_tile(config, 128, widest <= 128 ? 96 : 64, 2, 8);
  } else if (widest <= 64 && !much_to_find) {
    const bool causal = problem.band.right && !problem.band.left;
    set_tile(config, 192, 128, 4, 12);
    if (config.rounded_sums) set_tile(config, 128, 128, 2, 8);  // three groups leave no registers for them
    const std::int64_t usual = usual_rows(problem);
    const bool mostly_whole = 5 * round_up(usual, std::int64_t{192}) <= 6 * round_up(usual, std::int64_t{64});
    if (causal && rows <= kManyRows / 2) {
      set_tile(config, 64, 64, 4, 4);
    } else if (widest <= 32) {
      set_tile(config, rows <= kManyRows ? 64 : 128, 128, 2, rows <= kManyRows ? 4 : 8);
    } else if (!mostly_whole || blocks_that_count(config, problem) < target.multiprocessors) {
      set_tile(config, 64, 128, 2, 4);
    }
  } else {
    // Few keys make whole tiles of 64, and boxes of pages are to divide a tile.
    const int beside_most = config.source == Source::strided && problem.kv.seqlen >= 1024 ? 80 : 64;
    set_tile(config, 128, widest <= 128 ? 128 : widest <= 192 && !much_to_find ? 96 : beside_most, 2, 8);
  }
  const bool few = rows <= 64 || 2 * blocks_that_count(config, problem) <= target.multiprocessors;
  if (widest <= 128 && config.tile_m == 128 && few) {
    config.tile_m = 64;
    config.warps = 4;
  }
  // Beside 256 columns of O there are no registers left for more.
  if (widest > 192 && (problem.list || config.dropout || much_to_find)) config.tile_n = 32;
}

// Groups of 64 rows find phases of their own then, 1 to 3% better ones than in turn; but they begin in step, which
// costs a block about one tile of keys once. Those of narrower and wider heads, lists and pages do not; what else is
// left out was not measured.
bool gains_without_turns(const FwdConfig& config, const Problem& problem, const Target& target) {
  const bool settles =
      problem.kv.seqlen >= 4096 ||
      (problem.kv.seqlen >= 1024 && blocks_that_count(config, problem) >= std::int64_t{2} * target.multiprocessors);
  return config.products == Products::wgmma && config.warps > 4 && walks_plainly(config) &&
         std::max(config.d, config.dv) == 128 && settles;
}

// Measured on an H200, under SM120's plans within its shared memory (bench/results/nvidia-h200/README.md, by
// gpu_mma_loader_sm120.json): up to two row tiles a multiprocessor tma_warp takes 0.79 to 0.96 of cp.async's time; with
// more tma takes 0.93 to 0.97 at 64 columns, and both take 1.08 to 1.19 at 128.
Loader loader_of(const FwdConfig& config, const Problem& problem, const Target& target) {
  if (!has_tma(config, target)) return Loader::cp_async;
  if (target.sm == 90) return Loader::tma;
  const int widest = std::max(config.d, config.dv);
  const bool measured = is_plain(config) && (widest == 64 || widest == 128) && config.d == config.dv &&
                        problem.seqlen_q * packed_heads(problem) > 64;
  if (target.sm < 120 || !measured) return Loader::cp_async;
  FwdConfig of_128_rows = config;
  of_128_rows.tile_m = 128;
  if (blocks_that_count(of_128_rows, problem) <= std::int64_t{2} * target.multiprocessors) return Loader::tma_warp;
  return widest == 64 ? Loader::tma : Loader::cp_async;
}

}  // namespace

// Dropout's draws are cheapest where rows lie at consecutive positions, and a list of each head's own keeps heads
// apart.
std::int64_t packed_heads(const Problem& problem) {
  const bool apart = problem.dropout > 0.0F || (problem.list && problem.list.heads == TileList::Heads::q);
  return apart ? 1 : problem.group();
}

bool has_tma(const FwdConfig& config, const Target& target) {
  return target.sm >= 90 && config.source == Source::strided && config.tiles == Tiles::range && config.segments == 1 &&
         config.dv_parts == 1;
}

int box_rows(const FwdConfig& config, const KvSource& source) {
  const int together = config.tiles == Tiles::list ? config.run : config.tile_n;
  return is_paged(source) ? static_cast<int>(std::gcd<std::int64_t>(together, source.page_size)) : together;
}

int shared_bytes(const FwdConfig& config, const Problem& problem) {
  return config.smem_bytes() + (problem.list ? config.list_bytes(static_cast<int>(list_cells(config, problem))) : 0);
}

// The driver keeps 1 KB for each; a multiprocessor has 1 KB more than a block may ask for.
int blocks_that_fit(int bytes, const Target& target) { return (target.shared_memory + 1024) / (bytes + 1024); }

std::int64_t count_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits) {
  return row_tiles(config, problem) * config.dv_parts * count_heads(problem) * problem.batch * splits;
}

FwdConfig fwd_config(const Problem& problem, const Target& target, std::int64_t splits, const Wishes& wishes,
                     Products products) {
  FwdConfig config = features_of(problem, splits);
  config.products = products;
  if (products == Products::wgmma) {
    choose_wgmma_tile(config, problem, target);
    if (problem.list) choose_list_tiles(config, problem, packed_heads(problem), config.tile_n);
  } else {
    choose_tile(config, problem, target);
    if (problem.list) choose_list_tiles(config, problem, packed_heads(problem), most_keys(config));
  }
  if (products == Products::mma_sync && config.warps <= 4 && blocks_that_fit(config.smem_bytes(), target) < 2) {
    config.stages = 1;
    if (!problem.list) config.tile_n = std::min(config.tile_n, 96);  // a list's tiles are whole runs of its keys
  }
  // 99 KB hold 64 rows and 16 keys of 512 columns.
  if (products == Products::mma_sync && config.d > 256 && shared_bytes(config, problem) > target.shared_memory) {
    config.tile_n = 16;
    config.run = 16;
  }
  // There the compiler needs a few registers more.
  const bool few_left = target.sm >= 100 || config.rounded_sums;
  if (few_left && config.tile_m == 128 && config.tile_n == 48) config.tile_n = 32;
  // Chunks are found from 64-bit positions, which takes a few more yet; a list's tiles are whole runs of its keys.
  const bool tight = products == Products::mma_sync && config.tile_m == 128 && target.sm >= 90 && target.sm < 120;
  if (config.chunked && tight && !problem.list) {
    const int widest = std::max(config.d, config.dv);
    if (widest <= 64) config.tile_n = std::min(config.tile_n, 96);
    if (widest == 128 && config.d == config.dv) config.tile_n = std::min(config.tile_n, 48);
  }
  config.loader = products == Products::wgmma ? Loader::tma : loader_of(config, problem, target);
  const auto wish = [](int& field, const std::optional<std::int64_t>& value) {
    if (value) field = static_cast<int>(std::min<std::int64_t>(*value, 1 << 20));
  };
  wish(config.tile_m, wishes.tile_q);
  if (products == Products::wgmma && wishes.tile_q) config.warps = config.tile_m / 16;
  wish(config.tile_n, wishes.tile_kv);
  wish(config.stages, wishes.stages);
  wish(config.warps, wishes.warps);
  config.turns = !gains_without_turns(config, problem, target);
  config.varlen = products == Products::wgmma && problem.q_layout == Layout::varlen;
  if (!problem.list) config.run = config.tile_n;
  if (!wishes.loader.empty()) {
    config.loader = wishes.loader == "tma"        ? Loader::tma
                    : wishes.loader == "tma_warp" ? Loader::tma_warp
                                                  : Loader::cp_async;
  }
  return config;
}

// As many as fill the device twice, yet of at least 4 tiles each, since a part costs a partial result. The lengths that
// count are the capacities: the plan sees no others. Masses are relative to the sums of rows, of which parts would
// leave only the rounded LSE (tile_mass.cuh).
std::int64_t choose_splits(const Problem& problem, const Target& target, const Wishes& wishes, Products products) {
  if (wishes.splits) return *wishes.splits;
  if (problem.batch_invariant || target.multiprocessors == 0) return 1;
  if (gathers_mass(problem) && !problem.mass_prior_lse) return 1;
  const FwdConfig config = fwd_config(problem, target, 2, wishes, products);  // that of any parts
  const std::int64_t blocks = count_blocks(config, problem, 1);
  const std::int64_t tiles = keys_of(problem) / config.tile_n;
  if (blocks == 0 || blocks * 5 > std::int64_t{target.multiprocessors} * 4) return 1;
  return std::clamp<std::int64_t>(2 * target.multiprocessors / blocks, 1, std::clamp<std::int64_t>(tiles / 4, 1, 64));
}

// Under a causal mask the last rows have the most to do: those of all heads of a section first, so that the multi-
// processors end together. The keys and values of a section stay in L2; otherwise a section is one head's, so that its
// rows share them. All sections have equally many heads.
BlockOrder block_order(const FwdConfig& config, const Problem& problem, std::int64_t splits) {
  const std::int64_t planes = std::max<std::int64_t>(count_heads(problem) * problem.batch * splits, 1);
  std::int64_t section = 1;
  if ((problem.band.right && !problem.band.left) || problem.affine) {
    const std::int64_t bytes = keys_of(problem) * (problem.head_dim_qk + problem.head_dim_v) * bytes_of(config.type);
    // Of packed sequences, whose row tiles are not equally many, a section is within one (row_tiles.cuh).
    const std::int64_t whole = config.varlen ? count_heads(problem) * splits : planes;
    section = std::clamp<std::int64_t>(kSectionBytes / std::max<std::int64_t>(bytes, 1), 1, whole);
    while (whole % section != 0) --section;
  }
  const std::int64_t tiles = std::max<std::int64_t>(row_tiles(config, problem), 1);
  const auto divisor = [](std::int64_t n) { return Divisor(static_cast<int>(n)); };
  return {static_cast<int>(tiles * planes), static_cast<int>(tiles), divisor(tiles * section), divisor(section),
          divisor(count_heads(problem))};
}

}  // namespace tessera::cuda
