// SPDX-License-Identifier: Apache-2.0
// The parameters, besides FwdParams, of the two kernels that compute the probability mass of tiles and the next list.
// Strides are in elements.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

/// A tensor (batch, query head, query block, …), its last dimension contiguous.
struct BlockStrides {
  i64 batch, head, block;
};

struct MassParams {
  float* sums;  // (batch, query head, row tile, key block): Σ over rows of a row's mass in the tile, or of its square
  bool square;
  bool listed;        // FwdParams::list holds a list
  Divisor row_tiles;  // of a query block
  int block_q;
  int block_kv;
  int query_blocks;
  int key_blocks;
  int second_block;  // first key block of the second segment
  int heads;         // query heads

  float threshold;  // of the next list
  float* mass;      // outputs; null: not wanted
  int* next_counts;
  int* next_indices;
  u32* next_bits;
  BlockStrides mass_strides, counts_strides, indices_strides, bits_strides;
};

}  // namespace tessera::cuda
