// SPDX-License-Identifier: Apache-2.0
// How many blocks a forward runs on, and in which order these take their rows.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Blocks of all rows, heads, sequences and splits, by capacities.
std::int64_t count_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits);
/// Blocks of one split that may decide what is chosen: not the number of sequences where that must change no bit.
std::int64_t count_deciding_blocks(const FwdConfig& config, const Problem& problem);
TileSchedule tile_schedule(const FwdConfig& config, const Problem& problem, std::int64_t splits);

}  // namespace tessera::cuda
