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
ListParams list_params(const Problem& problem, const Bindings& bindings);
/// Of a list of either pass.
ListParams list_params(const Problem& problem, const TileList& list, const detail::ListSlots& slots,
                       const Bindings& bindings);

}  // namespace tessera::cuda
