// SPDX-License-Identifier: Apache-2.0
// How many blocks a forward runs on, and in which order these take their rows.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// What blocks that run side by side read again and again, at most: a third of the L2 of an H200 (50 MB). 32 and 64 MB
/// are up to 5% slower.
inline constexpr std::int64_t kL2GroupBytes = std::int64_t{16} << 20;

/// Blocks of all rows, heads, sequences and splits, by capacities.
std::int64_t count_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits);
/// Blocks of one split that may decide what is chosen: not the number of sequences where that must change no bit.
std::int64_t count_deciding_blocks(const FwdConfig& config, const Problem& problem);
/// `packed`: heads whose rows are packed.
TileSchedule tile_schedule(const FwdConfig& config, const Problem& problem, std::int64_t splits, std::int64_t packed);

}  // namespace tessera::cuda
