// SPDX-License-Identifier: Apache-2.0
#include "cpu/sparse/block_scores.h"

#include <algorithm>

#include "base/checked.h"

namespace tessera::cpu {
namespace {

/// Blocks that a tile takes whatever they score: below `initial`, and from `local_begin` to before `local_end`.
struct ForcedBlocks {
  ForcedBlocks(const Nsa& nsa, std::int64_t first_row) : initial(nsa.initial) {
    if (nsa.local == 0) return;
    local_begin = std::max<std::int64_t>(0, first_row / nsa.block - nsa.local + 1);
    local_end = (first_row + nsa.tile - 1) / nsa.block + 1;
  }
  [[nodiscard]] bool has(std::int64_t block) const {
    return block < initial || (block >= local_begin && block < local_end);
  }
  /// Places that they keep in the list, whether there are such blocks or not.
  [[nodiscard]] std::int64_t places() const {
    return initial + std::max<std::int64_t>(0, local_end - std::max(initial, local_begin));
  }
  std::int64_t initial, local_begin = 0, local_end = 0;
};

}  // namespace

void add_block_scores(const Nsa& nsa, const float* a, std::int64_t visible, float* scores) {
  if (nsa.score == SelectScore::dot) {
    for (std::int64_t j = 0; j < visible; ++j) scores[j] += a[j];
    return;
  }
  const std::int64_t parts = nsa.length / nsa.stride;       // a compressed block is so many strides long
  const std::int64_t block_parts = nsa.block / nsa.stride;  // and a selection block so many
  for (std::int64_t j = 0; j < visible; ++j) {
    for (std::int64_t part = j; part < j + parts;) {
      const std::int64_t block = part / block_parts;
      const std::int64_t end = std::min(j + parts, (block + 1) * block_parts);
      scores[block] += static_cast<float>(end - part) * a[j];
      part = end;
    }
  }
}

std::int64_t visible_blocks(const Nsa& nsa, std::int64_t position, std::int64_t blocks) {
  if (!nsa.causal) return blocks;
  const std::int64_t needed = nsa.visible == BlockVisible::complete ? nsa.length : 1;  // tokens of a block
  return position + 1 < needed ? 0 : std::min(blocks, (position + 1 - needed) / nsa.stride + 1);
}

std::int64_t candidate_blocks(const Nsa& nsa, std::int64_t visible) {
  return visible == 0 ? 0 : ((visible - 1) * nsa.stride + nsa.length - 1) / nsa.block + 1;
}

std::int32_t choose_blocks(const Nsa& nsa, const BlockChoice& choice, const float* scores, std::int32_t* order,
                           std::int32_t* indices) {
  const ForcedBlocks forced(nsa, choice.first_row);
  const std::int64_t last_row = choice.first_row + nsa.tile - 1;
  const std::int64_t all = detail::ceil_div(choice.tokens, nsa.block);
  const std::int64_t begun = nsa.causal ? std::min(all, last_row / nsa.block + 1) : all;
  std::int64_t count = 0;
  const auto take_forced = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < std::min(end, begun); ++block) {
      indices[count++] = static_cast<std::int32_t>(block);
    }
  };
  take_forced(0, forced.initial);
  take_forced(std::max(forced.initial, forced.local_begin), forced.local_end);
  std::int64_t others = 0;
  for (std::int64_t block = 0; block < std::min(choice.candidates, begun); ++block) {
    if (!forced.has(block)) order[others++] = static_cast<std::int32_t>(block);
  }
  const std::int64_t taken = std::min(others, nsa.top - forced.places());
  if (taken < others) {
    std::nth_element(order, order + taken, order + others, [scores](std::int32_t a, std::int32_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
  }
  std::copy_n(order, taken, indices + count);
  count += taken;
  std::sort(indices, indices + count);
  std::fill(indices + count, indices + nsa.top, -1);
  return static_cast<std::int32_t>(count);
}

}  // namespace tessera::cpu
