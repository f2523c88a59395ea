// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/config.h"

#include <algorithm>

#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/forward/tile_sizes.h"
#include "cuda/attention/kv/tensor_map.h"
#include "cuda/attention/masks/mask_tiles.h"
#include "cuda/attention/sparse/tile_mass.h"
#include "cuda/driver/occupancy.h"

namespace tessera::cuda {
namespace {

// With wgmma both products have operands of 8 bits, P included. The row sums are those of P before it is rounded.
void multiply_bytes(FwdConfig& config) {
  config.type = Element::e4m3;
  config.widens_queries = false;
  config.rounded_sums = false;
}

// Without ping-pong, consumer groups drift into an order of their own, which is 1 to 3% faster than turns at products.
// But they begin in step, which costs a block about the time of one tile of keys, once. Narrower heads of 16 bits,
// wider heads, lists and pages gain nothing. With turns, groups that exponentiate in turn, and causal ALiBi at 128
// columns, are 3 to 7% faster. Other cases were not measured.
bool gains_without_ping_pong(const FwdConfig& config, const Problem& problem, const Target& target) {
  const bool settles =
      problem.kv.seqlen >= 4096 ||
      (problem.kv.seqlen >= 1024 && count_deciding_blocks(config, problem) >= std::int64_t{2} * target.multiprocessors);
  const int widest = std::max(config.d, config.dv);
  if (config.exponentiates_in_turn() || config.linear_score) return false;
  return config.products == Products::wgmma && config.warps > 4 && walks_plainly(config) &&
         (widest == 128 || (config.eight_bits && widest < 128)) && settles;
}

// Measured on an H200 with SM120's plans, within its shared memory (bench/results/nvidia-h200/README.md, by
// gpu_mma_loader_sm120.json): with up to two row tiles a multiprocessor, tma_warp takes 0.79 to 0.96 of the time of
// cp.async. With more, tma takes 0.93 to 0.97 at 64 columns, and both take 1.08 to 1.19 at 128.
Loader loader_of(const FwdConfig& config, const Problem& problem, const Target& target) {
  if (!has_tma(config, target)) return Loader::cp_async;
  if (target.sm == 90) return Loader::tma;
  const int widest = std::max(config.d, config.dv);
  const bool measured = is_plain(config) && (widest == 64 || widest == 128) && config.d == config.dv &&
                        problem.seqlen_q * packed_heads(problem) > 64;
  if (target.sm < 120 || !measured) return Loader::cp_async;
  FwdConfig of_128_rows = config;
  of_128_rows.tile_q = 128;
  if (count_deciding_blocks(of_128_rows, problem) <= std::int64_t{2} * target.multiprocessors) return Loader::tma_warp;
  return widest == 64 ? Loader::tma : Loader::cp_async;
}

void apply(const Wishes& wishes, FwdConfig& config) {
  const auto wish = [](int& field, const std::optional<std::int64_t>& value) {
    if (value) field = static_cast<int>(std::min<std::int64_t>(*value, 1 << 20));
  };
  wish(config.tile_q, wishes.tile_q);
  if (config.products == Products::wgmma && wishes.tile_q) config.warps = config.tile_q / 16;
  wish(config.tile_kv, wishes.tile_kv);
  wish(config.stages, wishes.stages);
  wish(config.warps, wishes.warps);
  if (wishes.loader.empty()) return;
  config.loader = wishes.loader == "tma"        ? Loader::tma
                  : wishes.loader == "tma_warp" ? Loader::tma_warp
                                                : Loader::cp_async;
}

// Chooses FwdConfig::sums_by_product. A product has at most 256 columns, and with whole_rows a panel of V is not as far
// from the next as from the ones. The ones must cost a multiprocessor no block: rather than that, the ring gets two
// stages, which is 7% faster than four without ones (64 x 64 tiles at 64 columns).
void choose_sums(FwdConfig& config, const Target& target, const Wishes& wishes) {
  if (!config.rounded_sums || config.products != Products::wgmma || config.whole_rows || config.dv > 192) return;
  const auto blocks = [&](const FwdConfig& c) { return std::min(blocks_that_fit(c.smem_bytes(), target), c.blocks()); };
  FwdConfig with = config;
  with.sums_by_product = true;
  if (blocks(with) < blocks(config) && !wishes.stages) with.stages = 2;
  if (blocks(with) >= blocks(config)) config = with;
}

// Returns FwdConfig::keys_a_descale. Blocks of keys are counted from the first key of a sequence or page. Tiles begin
// at multiples of tile_kv, and the pieces of a list's tiles at multiples of the granule. So it is enough to divide
// these lengths.
int keys_a_descale(const FwdConfig& config, const Problem& problem) {
  if (config.products != Products::wgmma || !config.descales_keys) return 1;
  if (problem.quantization.grain != Grain::block) return 1;
  const auto divides = [&](int keys) {
    return problem.quantization.block % keys == 0 && config.tile_kv % keys == 0 &&
           (!problem.list || config.granule % keys == 0);
  };
  for (const int keys : {64, 32, 16}) {  // larger ones would need more kernels and gain little
    if (divides(keys)) return keys;
  }
  return 1;
}

}  // namespace

bool has_tma(const FwdConfig& config, const Target& target) {
  return target.sm >= 90 && !config.descales_keys && config.source == Source::strided && config.tiles == Tiles::range &&
         config.segments == 1 && config.dv_parts == 1;
}

FwdConfig fwd_config(const Problem& problem, const Target& target, std::int64_t splits, const Wishes& wishes,
                     Products products) {
  const bool wgmma = products == Products::wgmma;
  FwdConfig config = features_of(problem, splits);
  config.products = products;
  if (config.multiplies_bytes()) multiply_bytes(config);
  config.mask_bits = !config.by_keys() && has_mask_bits(problem);
  if (config.mask_bits) config.user_mask = false;
  if (wgmma) {
    choose_linear_score(config, problem);
    choose_wgmma_tiles(config, problem, target);
  } else if (config.by_keys()) {
    choose_decode_tiles(config, problem, target);
  } else {
    choose_mma_tiles(config, problem, target);
  }
  if (!config.by_keys()) config.loader = wgmma ? Loader::tma : loader_of(config, problem, target);
  apply(wishes, config);
  config.ping_pong = !gains_without_ping_pong(config, problem, target);
  config.merges = config.by_keys() && splits > 1;
  config.keys_a_descale = keys_a_descale(config, problem);
  config.whole_rows = has_whole_rows(config, problem);
  config.varlen = wgmma && problem.q_layout == Layout::varlen;
  if (!problem.list) config.granule = FwdConfig{}.granule;  // ranges have no granules
  choose_sums(config, target, wishes);
  return config;
}

// Chooses as many splits as make two blocks for each multiprocessor. Each split has at least 4 tiles, because it costs
// a partial result. Lengths are capacities, because the plan knows no others. Masses are relative to the sums of rows,
// of which splits would leave only the rounded LSE (tile_mass.cuh).
std::int64_t choose_splits(const Problem& problem, const Target& target, const Wishes& wishes, Products products) {
  if (wishes.splits) return *wishes.splits;
  if (problem.batch_invariant || problem.residual || problem.skip || target.multiprocessors == 0) return 1;
  if (gathers_mass(problem) && !problem.mass_prior_lse) return 1;
  const FwdConfig config = fwd_config(problem, target, 2, wishes, products);  // the same for any splits above 1
  if (config.by_keys()) return choose_decode_splits(config, problem, target);
  const std::int64_t blocks = count_blocks(config, problem, 1);
  const std::int64_t tiles = count_keys(problem) / config.tile_kv;
  if (blocks == 0 || blocks * 5 > std::int64_t{target.multiprocessors} * 4) return 1;
  return std::clamp<std::int64_t>(2 * target.multiprocessors / blocks, 1, std::clamp<std::int64_t>(tiles / 4, 1, 64));
}

}  // namespace tessera::cuda
