// SPDX-License-Identifier: Apache-2.0
#include "cpu/sparse/block_scores.h"

#include <algorithm>
#include <limits>

#include "base/checked.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kEndless = std::numeric_limits<std::int64_t>::max();

bool is_forced(const BlockChoice& choice, std::int64_t block) {
  return block < choice.initial || (block >= choice.local_begin && block < choice.local_end);
}
/// Entries of the list that are reserved for forced blocks, even if such blocks do not exist.
std::int64_t kept_places(const BlockChoice& choice) {
  return choice.initial + std::max<std::int64_t>(0, choice.local_end - std::max(choice.initial, choice.local_begin));
}

}  // namespace

void add_block_scores(const Nsa& nsa, const float* a, std::int64_t visible, float* scores) {
  if (nsa.score == SelectScore::dot) {
    for (std::int64_t j = 0; j < visible; ++j) scores[j] += a[j];
    return;
  }
  const std::int64_t parts = nsa.length / nsa.stride;       // strides in a compressed block
  const std::int64_t block_parts = nsa.block / nsa.stride;  // strides in a selection block
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

void raise_key_blocks(const Nsa& nsa, const float* keys, std::int64_t visible, float* scores) {
  for (std::int64_t begin = 0; begin < visible; begin += nsa.compressed_block, ++scores) {
    const std::int64_t end = std::min(visible, begin + nsa.compressed_block);
    float largest = *scores;
    for (std::int64_t j = begin; j < end; ++j) largest = keys[j] > largest ? keys[j] : largest;  // NaN never is
    *scores = largest;
  }
}

BlockChoice blocks_of_tokens(const Nsa& nsa, std::int64_t first_row, std::int64_t tokens, std::int64_t candidates) {
  BlockChoice choice;
  choice.top = nsa.top;
  choice.there = detail::ceil_div(tokens, nsa.block);
  choice.initial = nsa.initial;
  const std::int64_t last_block = (first_row + nsa.tile - 1) / nsa.block;
  if (nsa.causal) choice.there = std::min(choice.there, last_block + 1);
  if (nsa.local > 0) {
    choice.local_begin = std::max<std::int64_t>(0, first_row / nsa.block - nsa.local + 1);
    choice.local_end = last_block + 1;
  }
  choice.candidates = candidates;
  return choice;
}

BlockChoice blocks_of_keys(const Nsa& nsa, std::int64_t first_row, std::int64_t keys, std::int64_t visible) {
  BlockChoice choice;
  choice.top = nsa.compressed_top;
  choice.there = detail::ceil_div(keys, nsa.compressed_block);
  choice.candidates = detail::ceil_div(visible, nsa.compressed_block);
  const std::int64_t last = visible_blocks(nsa, first_row + nsa.tile - 1, kEndless);
  if (nsa.causal && last > 0) {
    const std::int64_t first = visible_blocks(nsa, first_row, kEndless);
    choice.local_begin = std::max<std::int64_t>(0, first - 1) / nsa.compressed_block;
    choice.local_end = (last - 1) / nsa.compressed_block + 1;
  }
  return choice;
}

std::int32_t choose_blocks(const BlockChoice& choice, const float* scores, std::int32_t* order, std::int32_t* indices) {
  std::int64_t count = 0;
  const auto take_forced = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < std::min(end, choice.there); ++block) {
      indices[count++] = static_cast<std::int32_t>(block);
    }
  };
  take_forced(0, choice.initial);
  take_forced(std::max(choice.initial, choice.local_begin), choice.local_end);
  std::int64_t others = 0;
  for (std::int64_t block = 0; block < std::min(choice.candidates, choice.there); ++block) {
    if (!is_forced(choice, block)) order[others++] = static_cast<std::int32_t>(block);
  }
  const std::int64_t taken = std::min(others, choice.top - kept_places(choice));
  if (taken < others) {
    std::nth_element(order, order + taken, order + others, [scores](std::int32_t a, std::int32_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
  }
  std::copy_n(order, taken, indices + count);
  count += taken;
  std::sort(indices, indices + count);
  std::fill(indices + count, indices + choice.top, -1);
  return static_cast<std::int32_t>(count);
}

}  // namespace tessera::cpu
