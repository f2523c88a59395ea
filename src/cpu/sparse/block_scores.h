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

/// Raises `scores` of blocks of compressed keys to those of their visible keys.
void raise_key_blocks(const Nsa& nsa, const float* keys, std::int64_t visible, float* scores);

/// What a tile may choose from for a list, and what it takes whatever that scores: blocks below `initial`, and from
/// `local_begin` to before `local_end`.
struct BlockChoice {
  std::int64_t top = 0;         // entries of the list
  std::int64_t there = 0;       // blocks that exist and have begun
  std::int64_t candidates = 0;  // scores of blocks below this count
  std::int64_t initial = 0, local_begin = 0, local_end = 0;
};
/// `first_row`: position p0 of the tile. Of a sequence of so many tokens, or compressed keys, of which `visible` score.
BlockChoice blocks_of_tokens(const Nsa& nsa, std::int64_t first_row, std::int64_t tokens, std::int64_t candidates);
BlockChoice blocks_of_keys(const Nsa& nsa, std::int64_t first_row, std::int64_t keys, std::int64_t visible);

/// Writes `top` indices: the blocks that are taken in ascending order, then −1. The result is how many. `order`: memory
/// for as many integers as there are candidates.
std::int32_t choose_blocks(const BlockChoice& choice, const float* scores, std::int32_t* order, std::int32_t* indices);

}  // namespace tessera::cpu
