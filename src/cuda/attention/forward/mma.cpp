// SPDX-License-Identifier: Apache-2.0
// The implementation cuda.fwd_mma: the forward for every chip from SM80 on.
#include <algorithm>

#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/launch.h"

namespace tessera::cuda {
namespace {

Support exists(const FwdConfig& c, const Problem& /*problem*/, const Target& target, const Wishes& wishes) {
  const auto refuse = [](const char* what, std::int64_t got, const std::string& want) {
    return Support::no(std::string(what) + " is " + std::to_string(got) + "; want " + want);
  };
  if (c.warps > 16 || (c.warps & (c.warps - 1)) != 0) return refuse("warps", c.warps, "1, 2, 4, 8 or 16");
  if (c.tile_q != c.warps * 16 && c.tile_q != c.warps * 32) return refuse("tile_q", c.tile_q, "16 or 32 rows a warp");
  if (c.stages > 4) return refuse("stages", c.stages, "1 to 4");
  // In a step of a copy each thread copies 16 bytes of a panel; a_step is the number of rows in a step.
  const int a_step = c.threads() / (c.panel_bytes() / kChunkBytes);
  if (a_step % 8 != 0 || c.tile_q % a_step != 0)
    return refuse("warps", c.warps, "as many as copy tile_q in whole steps");
  if (c.tile_kv % a_step != 0 || c.tile_kv % 16 != 0 || c.tile_kv > 256) {
    return refuse("tile_kv", c.tile_kv, "a multiple of " + std::to_string(std::max(a_step, 16)) + " up to 256");
  }
  if (c.tests_elements() && c.tile_kv > 128) return refuse("tile_kv", c.tile_kv, "at most 128 beside a mask callable");
  constexpr int most = 208;
  if (c.accumulators() > most) {
    return Support::no("needs " + std::to_string(c.accumulators()) +
                       " registers a thread for scores and output; want at most " + std::to_string(most));
  }
  const std::string& loader = wishes.loader;
  if (!loader.empty() && loader != "cp_async" && loader != "tma" && loader != "tma_warp") {
    return Support::no("loader is " + loader + "; want cp_async, tma or tma_warp");
  }
  if (c.uses_tma() && !has_tma(c, target)) {
    return Support::no("loader is " + loader +
                       "; that wants SM90 or newer, dense or varlen keys, one segment, no list, at most 256 columns of "
                       "v");
  }
  if (c.loader == Loader::tma_warp && c.warps != 4 && c.warps != 8) {  // one or two whole warpgroups
    return Support::no("loader is tma_warp with warps=" + std::to_string(c.warps) + "; want 4 or 8 warps");
  }
  return Support::yes();
}

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  return supports_forward(problem, target, wishes, Products::mma_sync, exists);
}

void plan(detail::PlanState& state) { plan_forward(state, Products::mma_sync); }

}  // namespace

const Implementation kFwdMma = {{"cuda.fwd_mma", DeviceType::cuda, Operation::attention, supports, plan, Pass::forward},
                                run_forward};

}  // namespace tessera::cuda
