// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding of bf16 states: the nearer neighbour is the likelier one, so that the expected value is exact.
// The random bits depend only on seed, offset, slot, head and element; docs/semantics.md has the counter.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/scores/philox.h"
#include "cpu/simd/kernels.h"
#include "tessera/executor.h"

namespace tessera::cpu {

class StateRounding {
 public:
  StateRounding(const Problem& problem, const Bindings& bindings, const Kernels& kernels, std::int64_t slot,
                std::int64_t head)
      : kernels_(kernels),
        type_(problem.linear.state_type),
        stochastic_(problem.linear.rounding == Rounding::stochastic),
        slot_(static_cast<std::uint32_t>(slot)),
        head_(static_cast<std::uint32_t>(head)) {
    const auto scalar = [&](Slot of, std::uint64_t otherwise) {
      return bindings[of] ? *bindings[of].as<std::uint64_t>() : otherwise;
    };
    const std::uint64_t offset = scalar(Slot::dropout_offset, bindings.offset);
    key_ = scalar(Slot::dropout_seed, bindings.seed) ^ (offset >> 32 << 32);
    offset_ = static_cast<std::uint32_t>(offset);
  }

  /// Stores row `row` of a head's state, of `count` elements.
  void store(const float* source, std::int64_t row, std::int64_t count, std::byte* to) const {
    if (!stochastic_) return kernels_.store_row(type_, source, count, to);
    for (std::int64_t at = 0; at < count; at += kDraws) {  // rows are multiples of 8 elements
      const PhiloxCounter words =
          philox4x32({static_cast<std::uint32_t>((row * count + at) / kDraws), head_, slot_, offset_},
                     {static_cast<std::uint32_t>(key_), static_cast<std::uint32_t>(key_ >> 32)});
      for (std::int64_t i = 0; i < kDraws; ++i) {
        const std::uint32_t draw = words[static_cast<std::size_t>(i / 2)] >> (16 * (i % 2)) & 0xffffU;
        const std::uint16_t bits = rounded(source[at + i], draw);
        std::memcpy(to + 2 * (at + i), &bits, sizeof bits);
      }
    }
  }

 private:
  static constexpr std::int64_t kDraws = 8;  // draws of one call, 16 bits each: as many bits as bf16 drops from fp32

  static std::uint16_t rounded(float value, std::uint32_t draw) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40U : (bits + draw) >> 16);
  }

  const Kernels& kernels_;
  DType type_;
  bool stochastic_;
  std::uint32_t slot_, head_, offset_ = 0;
  std::uint64_t key_ = 0;
};

}  // namespace tessera::cpu
