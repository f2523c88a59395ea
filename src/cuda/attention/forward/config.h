// SPDX-License-Identifier: Apache-2.0
// Chooses the configuration of a forward and its number of splits.
#pragma once

#include "shared/config.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Returns the target's best configuration, changed by wishes, which may ask for one that no kernel supports. It
/// follows, in this order, from the problem (features.h), the tiles (tile_sizes.h), the loader, and the wishes.
FwdConfig fwd_config(const Problem& problem, const Target& target, std::int64_t splits, const Wishes& wishes,
                     Products products);
/// Returns the number of splits: parts of the keys that different blocks compute.
std::int64_t choose_splits(const Problem& problem, const Target& target, const Wishes& wishes, Products products);
/// Whether TMA can load keys and values with Products::mma_sync.
bool has_tma(const FwdConfig& config, const Target& target);

}  // namespace tessera::cuda
