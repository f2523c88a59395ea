// SPDX-License-Identifier: Apache-2.0
// Finds the compressed keys of a sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/tiles/sequence.h"
#include "operations/nsa.h"

namespace tessera::cpu {

/// Tokens of a sequence, and its compressed blocks.
struct CompressedSequence {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t blocks = 0;
  std::int64_t first_block = 0;  // packed: row of its first block; dense: 0
};

/// Fills `first_blocks` (batch): rows of packed compressed keys before each sequence; zeros when dense. Returns the
/// number of packed rows.
std::int64_t find_first_blocks(const Problem& problem, const Bindings& bindings, std::int64_t* first_blocks);
CompressedSequence find_compressed(const Problem& problem, const Bindings& bindings, std::int64_t batch,
                                   const std::int64_t* first_blocks);

/// The rows of one sequence in k_pooled or a tensor like it.
RowView pooled_rows_of(const Problem& problem, const Tensor& tensor, const CompressedSequence& sequence);

}  // namespace tessera::cpu
