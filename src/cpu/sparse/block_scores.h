// SPDX-License-Identifier: Apache-2.0
// Scores of selection blocks for one tile of queries, and the blocks that are taken (docs/nsa.md).
#pragma once

#include <cstdint>

#include "tessera/problem.h"

namespace tessera::cpu {

/// Adds to `scores` what a head of a scoring row gives each selection block: a_j itself, or probabilities that have
/// been normalised. `a` are the products with the visible compressed keys.
void add_block_scores(const Nsa& nsa, const float* a, std::int64_t visible, float* scores);

/// Compressed blocks that a row at `position` sees of `blocks`.
std::int64_t visible_blocks(const Nsa& nsa, std::int64_t position, std::int64_t blocks);
/// Selection blocks below this share a token with a compressed block that is seen.
std::int64_t candidate_blocks(const Nsa& nsa, std::int64_t visible);

/// Where a tile is, and what it may choose from.
struct BlockChoice {
  std::int64_t first_row;   // position p0
  std::int64_t tokens;      // of the sequence
  std::int64_t candidates;  // scores of blocks below this count
};
/// Writes `top` indices: the blocks that are taken in ascending order, then −1. The result is how many. `order`: memory
/// for as many integers as there are candidates.
std::int32_t choose_blocks(const Nsa& nsa, const BlockChoice& choice, const float* scores, std::int32_t* order,
                           std::int32_t* indices);

}  // namespace tessera::cpu
