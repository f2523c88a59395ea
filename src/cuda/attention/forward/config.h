// SPDX-License-Identifier: Apache-2.0
// Which kernel a forward runs, and in how many parts of the keys.
#pragma once

#include "shared/config.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The target's best configuration, changed as wished; a wish may make it one that no kernel can be. In order: what the
/// problem asks for (features.h), tiles (tile_sizes.h), the loader, wishes.
FwdConfig fwd_config(const Problem& problem, const Target& target, std::int64_t splits, const Wishes& wishes,
                     Products products);
/// Parts of the keys, each for blocks of its own.
std::int64_t choose_splits(const Problem& problem, const Target& target, const Wishes& wishes, Products products);
/// Whether keys of products by mma.sync, whose warps have rows of their own, may come by TMA.
bool has_tma(const FwdConfig& config, const Target& target);

}  // namespace tessera::cuda
