// SPDX-License-Identifier: Apache-2.0
// Checks the inputs of a skip state's step: thresholds in range, and the blocks that it must or must not compute.
#include <cmath>

#include "bindings/validate_parts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

[[noreturn]] void refuse(Slot slot, std::int64_t index, std::string got, std::string want) {
  throw Error(ErrorCode::out_of_range, std::string(to_string(slot)),
              "(" + std::to_string(index) + ") = " + std::move(got), std::move(want));
}

void check_threshold(const Problem& p, const Tensor& thresholds, std::int64_t head) {
  const float value = thresholds.as<const float>()[head * thresholds.strides[0]];
  if (std::isinf(value) && value < 0) return;
  const bool mass = p.skip.kind == SkipRule::Kind::mass;
  // With a threshold outside of this range, a step would keep no tile at all, or every tile.
  if (mass ? value < 2.0F : value >= -100.0F && value <= 0.0F) return;
  refuse(Slot::skip_threshold, head, std::to_string(value),
         mass ? "a power of two below 2, or -inf to keep every tile"
              : "a power of two from -100 to 0, or -inf to keep every tile");
}

const std::uint32_t* words_of(const Tensor& bits) { return bits ? bits.as<const std::uint32_t>() : nullptr; }

}  // namespace

void check_skip_step(const Problem& p, const Bindings& bindings) {
  for (std::int64_t h = 0; h < p.heads_q; ++h) check_threshold(p, bindings[Slot::skip_threshold], h);
  if (p.skip.kind == SkipRule::Kind::threshold) {
    const std::int64_t step = int32_at(bindings[Slot::skip_step], 0);
    if (step < 0) refuse_element(Slot::skip_step, 0, step, "0 or more");
  }
  const std::uint32_t* done = words_of(bindings[Slot::must_do_bits]);
  const std::uint32_t* skipped = words_of(bindings[Slot::must_skip_bits]);
  bool all_skipped = skipped != nullptr && p.key_blocks() > 0;
  for (std::int64_t first = 0; first < p.key_blocks(); first += 32) {
    const std::int64_t word = first / 32;
    const std::int64_t blocks = p.key_blocks() - first;
    const std::uint32_t there = blocks >= 32 ? ~0U : (1U << blocks) - 1U;
    for (const auto& [slot, words] : {std::pair{Slot::must_do_bits, done}, {Slot::must_skip_bits, skipped}}) {
      if (words == nullptr || (words[word] & ~there) == 0) continue;
      refuse(slot, word, std::to_string(words[word]), "no bit at or above block " + std::to_string(p.key_blocks()));
    }
    if (skipped == nullptr) continue;
    if (done != nullptr && (done[word] & skipped[word]) != 0) {
      refuse(Slot::must_skip_bits, word, std::to_string(skipped[word]), "no bit that must_do_bits has too");
    }
    all_skipped = all_skipped && skipped[word] == there;
  }
  if (!all_skipped) return;
  throw Error(ErrorCode::out_of_range, "must_skip_bits", "every key block", "a key block that is left");
}

}  // namespace tessera::detail
