// SPDX-License-Identifier: Apache-2.0
// Which kernel a forward runs, on how many blocks, and in which order these take their rows.
#pragma once

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Query heads that share the rows of a tile: those of a group, or 1.
std::int64_t packed_heads(const Problem& problem);
/// Parts of the keys, each for blocks of its own.
std::int64_t choose_splits(const Problem& problem, const Target& target, const Wishes& wishes, Products products);
/// The target's best configuration, changed as wished; a wish may make it one that no kernel can be.
FwdConfig fwd_config(const Problem& problem, const Target& target, std::int64_t splits, const Wishes& wishes,
                     Products products);
/// Whether keys of products by mma.sync may come by TMA.
bool has_tma(const FwdConfig& config, const Target& target);
/// Rows of a source that a tile takes together and that lie together: as far as pages and runs of a list do.
int box_rows(const FwdConfig& config, const KvSource& source);
/// Blocks of so many bytes that the shared memory of a multiprocessor has room for.
int blocks_that_fit(int bytes, const Target& target);
/// Shared memory of a block, with what a list adds, which depends on the problem's capacity and not on the code.
int shared_bytes(const FwdConfig& config, const Problem& problem);
/// Blocks of all rows, heads, sequences and splits, by capacities.
std::int64_t count_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits);
TileSchedule tile_schedule(const FwdConfig& config, const Problem& problem, std::int64_t splits);

}  // namespace tessera::cuda
