// SPDX-License-Identifier: Apache-2.0
// Scores of selection blocks for one tile of queries, and the blocks that are taken (docs/nsa.md).
#pragma once

#include <cstdint>

#include "tessera/problem.h"

namespace tessera::cpu {

/// Adds to the scores of selection blocks what one head of a scoring row contributes. `a`: the products with the
/// visible compressed keys, or their softmax.
void add_block_scores(const Nsa& nsa, const float* a, std::int64_t visible, float* scores);

/// How many of `blocks` compressed blocks a row at `position` sees.
std::int64_t visible_blocks(const Nsa& nsa, std::int64_t position, std::int64_t blocks);
/// The end of the selection blocks that share a token with a visible compressed block.
std::int64_t candidate_blocks(const Nsa& nsa, std::int64_t visible);

/// Raises the score of each block of compressed keys to the largest one of its visible keys.
void raise_key_blocks(const Nsa& nsa, const float* keys, std::int64_t visible, float* scores);

/// The blocks that a tile may choose for a list. Blocks below `initial`, and from `local_begin` to before `local_end`,
/// are taken whatever their scores are.
struct BlockChoice {
  std::int64_t top = 0;         // entries of the list
  std::int64_t there = 0;       // blocks that exist and, with a causal mask, begin before the tile ends
  std::int64_t candidates = 0;  // only blocks below this have scores
  std::int64_t initial = 0, local_begin = 0, local_end = 0;
};
/// The choices of a tile whose first position is `first_row`. The sequence has `tokens` tokens or `keys` compressed
/// keys. Only blocks below `candidates`, or those of the first `visible` keys, have scores.
BlockChoice blocks_of_tokens(const Nsa& nsa, std::int64_t first_row, std::int64_t tokens, std::int64_t candidates);
BlockChoice blocks_of_keys(const Nsa& nsa, std::int64_t first_row, std::int64_t keys, std::int64_t visible);

/// Writes `top` indices: the taken blocks in ascending order, then −1. Returns how many blocks are taken. `order`:
/// scratch for as many integers as there are candidates.
std::int32_t choose_blocks(const BlockChoice& choice, const float* scores, std::int32_t* order, std::int32_t* indices);

}  // namespace tessera::cpu
