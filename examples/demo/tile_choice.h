// SPDX-License-Identifier: Apache-2.0
// From the probability mass per tile to a list of the tiles worth computing.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/tensor.h"

namespace demo {

/// A list of tiles in the form `indices`: counts (batch, heads, query blocks), indices (batch, heads, query blocks, key
/// blocks) of which the first `count` are used, sorted.
struct TileChoice {
  std::int64_t heads = 0, query_blocks = 0, key_blocks = 0;
  std::vector<std::int32_t> counts;
  std::vector<std::int32_t> indices;
  double kept_percent = 0;  // of the tiles that the causal mask leaves anything of

  [[nodiscard]] bool kept(std::int64_t head, std::int64_t query_block, std::int64_t key_block) const;
  /// Kept tiles of one head, in percent of its causal tiles.
  [[nodiscard]] double kept_percent_of(std::int64_t head) const;
  [[nodiscard]] tessera::Tensor counts_tensor();
  [[nodiscard]] tessera::Tensor indices_tensor();
};

/// For every (head, query block) the fewest tiles that together hold `part` of the block's probability mass.
/// `mass`: fp32 (1, heads, query blocks, key blocks) as the library writes it; square tiles, causal.
TileChoice choose_tiles(const tessera::Tensor& mass, double part);

}  // namespace demo
