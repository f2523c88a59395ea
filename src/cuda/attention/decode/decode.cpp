// SPDX-License-Identifier: Apache-2.0
// The implementation cuda.fwd_decode: the forward for few rows, on every chip from SM80 on.
#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/launch.h"
#include "cuda/attention/forward/tile_sizes.h"
#include "cuda/attention/sparse/tile_mass.h"

namespace tessera::cuda {
namespace {

Support supports_tiles(const FwdConfig& c) {
  const auto refuse = [](const char* what, std::int64_t got, const std::string& want) {
    return Support::no(std::string(what) + " is " + std::to_string(got) + "; want " + want);
  };
  if (c.tile_q != 16 && c.tile_q != 32) return refuse("tile_q", c.tile_q, "16 or 32");
  if (c.tile_kv != 16 && c.tile_kv != 32) return refuse("tile_kv", c.tile_kv, "16 or 32");
  if (c.warps > 8 || (c.warps & (c.warps - 1)) != 0) return refuse("warps", c.warps, "1, 2, 4 or 8");
  if (c.stages < 2 || c.stages > 8) return refuse("stages", c.stages, "2 to 8");
  if (c.ring_bytes() < c.warp_part_bytes()) {
    return refuse("stages", c.stages, "as many as hold a warp's part of the output");
  }
  constexpr int most = 192;
  if (c.accumulators() > most) {
    return Support::no("needs " + std::to_string(c.accumulators()) +
                       " registers a thread for scores and output; want at most " + std::to_string(most));
  }
  return Support::yes();
}

// With more rows, keys would be read once for each row tile.
Support has_few_rows(const FwdConfig& c, const Problem& problem) {
  const std::int64_t rows = problem.seqlen_q * packed_heads(problem);
  if (rows <= c.tile_q) return Support::yes();
  return Support::no("is slower for " + std::to_string(rows) + " rows a sequence and head; wants at most " +
                     std::to_string(c.tile_q) + ", or to be wished for");
}

Support exists(const FwdConfig& c, const Problem& problem, const Target& target, const Wishes& wishes) {
  if (c.tiles != Tiles::range) return Support::no("walks no lists");
  if (c.dv_parts > 1 || c.d > 256) return Support::no("wants at most 256 columns");
  if (const Support s = supports_tiles(c); !s) return s;
  if (!wishes.loader.empty() && wishes.loader != "cp_async" && wishes.loader != "tma") {
    return Support::no("loader is " + wishes.loader + "; want cp_async or tma");
  }
  if (c.uses_tma() && !has_decode_tma(c, problem, target)) {
    return Support::no("loader is tma; that wants SM90 or newer and one source of keys");
  }
  return wishes.implementation.empty() && !c.eight_bits ? has_few_rows(c, problem) : Support::yes();
}

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (gathers_mass(problem)) return Support::no("gathers no masses");
  return supports_forward(problem, target, wishes, Products::mma_by_keys, exists);
}

void plan(detail::PlanState& state) { plan_forward(state, Products::mma_by_keys); }

}  // namespace

const Implementation kFwdDecode = {
    {"cuda.fwd_decode", DeviceType::cuda, Operation::attention, supports, plan, Pass::forward}, run_forward};

}  // namespace tessera::cuda
