// SPDX-License-Identifier: Apache-2.0
#include "tile_choice.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace demo {
namespace {

// Tiles on and below the diagonal.
std::int64_t causal_tiles(std::int64_t query_blocks, std::int64_t key_blocks) {
  std::int64_t tiles = 0;
  for (std::int64_t block = 0; block < query_blocks; ++block) tiles += std::min(block + 1, key_blocks);
  return tiles;
}

}  // namespace

bool TileChoice::kept(std::int64_t head, std::int64_t query_block, std::int64_t key_block) const {
  const std::int64_t line = head * query_blocks + query_block;
  const auto begin = indices.begin() + static_cast<std::ptrdiff_t>(line * key_blocks);
  return std::binary_search(begin, begin + counts[static_cast<std::size_t>(line)],
                            static_cast<std::int32_t>(key_block));
}

double TileChoice::kept_percent_of(std::int64_t head) const {
  const auto begin = counts.begin() + static_cast<std::ptrdiff_t>(head * query_blocks);
  return 100.0 * std::accumulate(begin, begin + query_blocks, 0.0) /
         static_cast<double>(causal_tiles(query_blocks, key_blocks));
}

tessera::Tensor TileChoice::counts_tensor() {
  return tessera::Tensor::contiguous(counts.data(), tessera::DType::int32, {1, heads, query_blocks});
}

tessera::Tensor TileChoice::indices_tensor() {
  return tessera::Tensor::contiguous(indices.data(), tessera::DType::int32, {1, heads, query_blocks, key_blocks});
}

TileChoice choose_tiles(const tessera::Tensor& mass, double part) {
  TileChoice choice;
  choice.heads = mass.shape[1];
  choice.query_blocks = mass.shape[2];
  choice.key_blocks = mass.shape[3];
  const std::int64_t lines = choice.heads * choice.query_blocks;
  choice.counts.resize(static_cast<std::size_t>(lines));
  choice.indices.assign(static_cast<std::size_t>(lines * choice.key_blocks), -1);
  std::vector<std::int32_t> order(static_cast<std::size_t>(choice.key_blocks));
  for (std::int64_t line = 0; line < lines; ++line) {
    const float* row = mass.as<float>() + line * choice.key_blocks;
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [row](std::int32_t a, std::int32_t b) { return row[a] > row[b]; });
    const double wanted = part * std::accumulate(row, row + choice.key_blocks, 0.0);
    double held = 0;
    std::size_t count = 0;
    while (count < order.size() && row[order[count]] > 0 && (count == 0 || held < wanted)) held += row[order[count++]];
    std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
    std::copy_n(order.begin(), count, choice.indices.begin() + static_cast<std::ptrdiff_t>(line * choice.key_blocks));
    choice.counts[static_cast<std::size_t>(line)] = static_cast<std::int32_t>(count);
  }
  for (std::int64_t head = 0; head < choice.heads; ++head) {
    choice.kept_percent += choice.kept_percent_of(head) / static_cast<double>(choice.heads);
  }
  return choice;
}

}  // namespace demo
