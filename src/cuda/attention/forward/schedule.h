// SPDX-License-Identifier: Apache-2.0
// The number of blocks of a forward, and the order of their row tiles.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The most bytes that blocks which run side by side read repeatedly: a third of the L2 of an H200 (50 MB). 32 and 64
/// MB are up to 5% slower.
inline constexpr std::int64_t kL2GroupBytes = std::int64_t{16} << 20;

/// Returns the number of blocks for all rows, heads, sequences and splits, by capacity.
std::int64_t count_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits);
/// Returns the number of blocks, for one split, on which choices may depend. With batch_invariant it is that of one
/// sequence, so that the number of sequences changes no bit of a result.
std::int64_t count_deciding_blocks(const FwdConfig& config, const Problem& problem);
/// `packed`: heads whose rows are packed.
TileSchedule tile_schedule(const FwdConfig& config, const Problem& problem, std::int64_t splits, std::int64_t packed);

}  // namespace tessera::cuda
