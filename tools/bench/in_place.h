// SPDX-License-Identifier: Apache-2.0
// A pass over memory in place, each element read and written once: what a decode step of linear attention does to its
// states, without anything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/jit/kernel.h"
#include "tessera/executor.h"

namespace tessera::cli {

/// One way to do it: each thread asks for `loads` times 16 bytes before it uses any.
class InPlacePass {
 public:
  InPlacePass(int threads, int loads, const Target& target, Stream stream);
  /// Whether so many bytes are whole blocks.
  [[nodiscard]] bool fits(std::size_t bytes) const noexcept { return bytes > 0 && bytes % a_block() == 0; }
  /// Multiplies each of the fp32 numbers by 1.
  void launch(void* memory, std::size_t bytes, Stream stream) const;

 private:
  [[nodiscard]] std::size_t a_block() const noexcept { return static_cast<std::size_t>(threads_ * loads_) * 16; }

  int threads_;
  int loads_;
  const cuda::Kernel* kernel_;
};

/// The ways that are tried; the best of them is the measure.
struct InPlaceWay {
  int threads, loads;
};
std::span<const InPlaceWay> in_place_ways() noexcept;

}  // namespace tessera::cli
