// SPDX-License-Identifier: Apache-2.0
// Tile lists of a forward kernel: the choice of tiles that fit a list, and its parameters.
#pragma once

#include "bindings/slot_rules.h"
#include "shared/config.h"
#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Chooses tiles that fit the problem's list. `packed_heads`: the heads that share the rows of a tile; `most_keys`: the
/// most keys of a tile.
void choose_list_tiles(FwdConfig& config, const Problem& problem, std::int64_t packed_heads, int most_keys);
ListParams list_params(const Problem& problem, const Bindings& bindings);
/// The same for the list of either pass.
ListParams list_params(const Problem& problem, const TileList& list, const detail::ListSlots& slots,
                       const Bindings& bindings);

}  // namespace tessera::cuda
