// SPDX-License-Identifier: Apache-2.0
// What a run must not read, or must not use: NaN with several payloads, because arithmetic on the bits of a number
// turns some NaNs into finite values and keeps others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tessera/executor.h"
#include "tessera/problem.h"
#include "tessera/tensor.h"

namespace tessera::cases {

inline constexpr std::uint64_t kNanKinds = 6;
/// Bits of a NaN of a type that results may have: the default one, all ones, the payload's lowest bit, its low half,
/// and two signalling ones, by `kind` modulo kNanKinds.
std::uint32_t nan_bits(DType dtype, std::uint64_t kind) noexcept;

/// Fills whole elements: NaN of a kind in such a type, −1 in every signed one.
void poison(std::span<std::byte> bytes, DType dtype, std::uint64_t kind) noexcept;

/// Rows of K and V that no sequence uses: behind its end, in the rest of its last page, in pages that it has not.
void poison_unused_keys(const Problem& problem, const Bindings& bindings);

/// Memory aligned to 64 bytes, poisoned.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(std::size_t bytes, DType dtype = DType::int8, std::uint64_t kind = 0);
  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte[], Free> data_;
};

}  // namespace tessera::cases
