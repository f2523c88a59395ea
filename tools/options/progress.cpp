// SPDX-License-Identifier: Apache-2.0
#include "options/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace tessera::cli {
namespace {

std::string duration(double seconds) {
  const auto whole = std::lround(seconds);
  if (whole >= 3600) return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}s", whole);
}

}  // namespace

Progress::Progress(std::uint64_t total)
    : total_(total), terminal_(isatty(STDERR_FILENO) == 1), start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() { clear(); }

void Progress::update(std::uint64_t done, std::string_view what) {
  update_fraction(total_ == 0 ? -1.0 : static_cast<double>(done) / static_cast<double>(total_), what);
}

void Progress::update_fraction(double finished, std::string_view what) {
  if (!terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string line;
  if (finished < 0.0) {
    line = fmt::format("{} elapsed  {}", duration(elapsed), what);
  } else {
    const double part = std::clamp(finished, 0.0, 1.0);
    const std::string left = part > 0.0 ? duration(elapsed * (1.0 - part) / part) + " left" : std::string("starting");
    line = fmt::format("{:3.0f}%  {}  {}", part * 100.0, left, what);
  }
  constexpr std::size_t kWidth = 110;  // characters; a longer line would wrap and leave rubbish behind
  if (line.size() > kWidth) line.resize(kWidth);
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace tessera::cli
