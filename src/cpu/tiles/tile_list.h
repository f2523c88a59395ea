// SPDX-License-Identifier: Apache-2.0
// Reads a tile list in any of its forms: which key blocks a query block uses, and which of them are full.
#pragma once

#include <cstdint>

#include "tessera/executor.h"

namespace tessera::cpu {

class TileListReader {
 public:
  TileListReader() = default;
  /// `backward` takes the bwd_ slots. Reads nothing when the form is none.
  TileListReader(const Problem& problem, const Bindings& bindings, bool backward);

  [[nodiscard]] bool active() const { return form_ != TileList::Form::none; }
  /// none: skipped; partial or full as listed. `head` is a query head.
  [[nodiscard]] TileClass at(std::int64_t batch, std::int64_t head, std::int64_t query_block,
                             std::int64_t key_block) const;
  /// The first listed key block at or after `from`, or `end`.
  [[nodiscard]] std::int64_t next(std::int64_t batch, std::int64_t head, std::int64_t query_block, std::int64_t from,
                                  std::int64_t end) const;

 private:
  // One of the two disjoint lists.
  struct Entries {
    Tensor counts, indices, bits;
  };
  [[nodiscard]] bool contains(const Entries& entries, std::int64_t b, std::int64_t h, std::int64_t query_block,
                              std::int64_t key_block) const;
  [[nodiscard]] std::int64_t next_in(const Entries& entries, std::int64_t b, std::int64_t h, std::int64_t query_block,
                                     std::int64_t from, std::int64_t end) const;
  [[nodiscard]] std::uint32_t word(const std::uint32_t* row, std::int64_t index) const {
    std::uint32_t bits = row[index];
    if (must_do_ != nullptr) bits |= must_do_[index];
    if (must_skip_ != nullptr) bits &= ~must_skip_[index];
    return bits;
  }
  [[nodiscard]] std::int64_t list_head(std::int64_t head) const { return head / heads_divisor_; }

  TileList::Form form_ = TileList::Form::none;
  bool per_batch_ = true;
  bool has_full_ = false;
  std::int64_t heads_divisor_ = 1;
  Entries partial_, full_;
  const std::uint32_t* must_do_ = nullptr;  // of a skip state: words for all rows, or nullptr
  const std::uint32_t* must_skip_ = nullptr;
};

}  // namespace tessera::cpu
