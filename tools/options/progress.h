// SPDX-License-Identifier: Apache-2.0
// One line of progress on stderr with an estimate of the time left; silent when stderr is not a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::cli {

class Progress {
 public:
  /// `total` steps of equal weight; 0 when unknown (then no estimate is shown).
  explicit Progress(std::uint64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` steps are finished and `what` is under way. Redraws at most ten times a second.
  void update(std::uint64_t done, std::string_view what);
  /// As update, with the finished part given in [0, 1] (a run limited by time, or steps of unequal weight).
  void update_fraction(double finished, std::string_view what);
  /// Erases the line, so that something else can be printed.
  void clear();

 private:
  std::uint64_t total_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace tessera::cli
