// SPDX-License-Identifier: Apache-2.0
// Tile lists for a forward kernel: how they fit its tiles, and what it is given.
#pragma once

#include "bindings/slot_rules.h"
#include "shared/config.h"
#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Fits tiles to the problem's list. `packed_heads`: that share the rows of a tile; `most_keys`: that a tile may take.
void choose_list_tiles(FwdConfig& config, const Problem& problem, std::int64_t packed_heads, int most_keys);
/// Cells of `run` keys in both segments, each a multiple of 32.
std::int64_t list_cells(const FwdConfig& config, const Problem& problem);
/// Shared memory of a block, with what a list adds, which depends on the problem's capacity and not on the code.
int shared_bytes(const FwdConfig& config, const Problem& problem);
ListParams list_params(const FwdConfig& config, const Problem& problem, const Bindings& bindings);
/// Of a list of either pass, for who has no cells.
ListParams list_params(const Problem& problem, const TileList& list, const detail::ListSlots& slots,
                       const Bindings& bindings);

}  // namespace tessera::cuda
