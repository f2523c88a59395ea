// SPDX-License-Identifier: Apache-2.0
// Which tiles a forward's configuration has: rows of queries, keys, warps and stages, by what was measured, by what a
// chip's shared memory holds and by what registers its compiler needs.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// By mma.sync, for every chip: SM80, SM89, SM90, SM100, SM120.
void choose_mma_tiles(FwdConfig& config, const Problem& problem, const Target& target);
/// By wgmma: SM90.
void choose_wgmma_tiles(FwdConfig& config, const Problem& problem, const Target& target);
/// By mma.sync, for every chip, warps by keys (attention/decode): the loader too.
void choose_decode_tiles(FwdConfig& config, const Problem& problem, const Target& target);
/// Parts of the keys for that.
std::int64_t choose_decode_splits(const FwdConfig& config, const Problem& problem, const Target& target);
/// Whether its keys may come by TMA.
bool has_decode_tma(const FwdConfig& config, const Problem& problem, const Target& target);

inline void set_tile(FwdConfig& config, int tile_q, int tile_kv, int stages, int warps = 4) {
  config.tile_q = tile_q;
  config.tile_kv = tile_kv;
  config.stages = stages;
  config.warps = warps;
}

}  // namespace tessera::cuda
