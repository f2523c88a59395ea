// SPDX-License-Identifier: Apache-2.0
// Chooses the tiles of a forward's configuration: query rows, keys, warps and stages. They follow from measurements,
// from a chip's shared memory, and from the registers that its compiler needs.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// For Products::mma_sync, on every chip: SM80, SM89, SM90, SM100, SM120.
void choose_mma_tiles(FwdConfig& config, const Problem& problem, const Target& target);
/// For Products::wgmma: SM90.
void choose_wgmma_tiles(FwdConfig& config, const Problem& problem, const Target& target);
/// For Products::mma_by_keys (attention/decode), on every chip. Also chooses the loader.
void choose_decode_tiles(FwdConfig& config, const Problem& problem, const Target& target);
/// Returns the number of splits for Products::mma_by_keys.
std::int64_t choose_decode_splits(const FwdConfig& config, const Problem& problem, const Target& target);
/// Whether TMA can load keys and values with Products::mma_by_keys.
bool has_decode_tma(const FwdConfig& config, const Problem& problem, const Target& target);

inline void set_tile(FwdConfig& config, int tile_q, int tile_kv, int stages, int warps = 4) {
  config.tile_q = tile_q;
  config.tile_kv = tile_kv;
  config.stages = stages;
  config.warps = warps;
}

}  // namespace tessera::cuda
