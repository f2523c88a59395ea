// SPDX-License-Identifier: Apache-2.0
// The host side of the tile lists of a backward: the size of TileBits, and the parameters of its kernels.
#pragma once

#include "shared/backward.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The list whose tiles a backward visits: its own or the forward's.
const TileList& backward_list(const Problem& problem);
std::int64_t list_batches(const Problem& problem);
/// Rows of the list, of one head and sequence.
std::int64_t list_rows(const Problem& problem);
/// Words of the TileBits of a pass; 0 without a list.
std::int64_t bit_count(const Problem& problem, const BwdConfig& config);
TileBits tile_bits(const Problem& problem, const BwdConfig& config, u32* words);
ListParams bwd_list_params(const Problem& problem, const Bindings& bindings);

}  // namespace tessera::cuda
