// SPDX-License-Identifier: Apache-2.0
// Software prefetching: the next rows are requested while others are computed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::cpu {

/// The rows, `bytes` long, that are read next.
struct RowsAhead {
  const std::byte* const* rows = nullptr;
  std::int64_t count = 0;
  std::int64_t bytes = 0;
};

/// Prefetches rows line by line (64 bytes), into L2: L1 can wait for only few lines at a time.
class Prefetcher {
 public:
  explicit Prefetcher(const RowsAhead& ahead)
      : row_(ahead.rows), last_(ahead.rows + ahead.count), bytes_(ahead.bytes) {}
  void line() {
    if (row_ == last_) return;
    __builtin_prefetch(*row_ + byte_, 0, 2);
    byte_ += 64;
    if (byte_ < bytes_) return;
    byte_ = 0;
    ++row_;
  }
  void lines(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) line();
  }
  void rest() {
    while (row_ != last_) line();
  }

 private:
  const std::byte* const* row_;
  const std::byte* const* last_;
  std::int64_t bytes_;
  std::int64_t byte_ = 0;
};

/// How many lines each of `steps` steps prefetches, so that together they prefetch all.
inline std::int64_t lines_a_step(const RowsAhead& ahead, std::int64_t steps) {
  return ((ahead.bytes + 63) / 64 * ahead.count + steps - 1) / steps;
}

}  // namespace tessera::cpu
