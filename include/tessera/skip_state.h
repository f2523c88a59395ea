// SPDX-License-Identifier: Apache-2.0
// A list of tiles that lives across the steps of a diffusion run, with what makes the next step's of it
// (docs/skip-state.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera {

/// Tokens [begin, end) of the keys; those of a second source follow at kv.seqlen.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const TokenRange&) const = default;
};

/// What a skip state is made with besides its problem.
struct SkipOptions {
  /// Thresholds of the first and the last step. `mass`: masses above 0 and below 4, between them in geometric
  /// progression. `threshold`: powers of two from −100 to 0, between them in arithmetic progression.
  struct Ramp {
    float first = 0;
    float last = 0;
    bool operator==(const Ramp&) const = default;
  };
  struct Head {
    std::int64_t head = 0;  // query head
    Ramp ramp;
  };

  std::int64_t steps = 50;   // of a run, 1 and more
  std::int64_t warm_up = 2;  // first steps, which keep every tile that they compute
  Ramp ramp{0.002F, 0.012F};
  std::vector<Head> heads = {};  // those that have other thresholds
  std::string layer = {};        // whose state it is; a file of another layer's is refused. No line breaks
};

/// θ of every step and query head, (steps, hq) in powers of two: docs/skip-state.md, section 4. Throws Error for a
/// problem without `skip`, and for options out of range.
std::vector<float> skip_thresholds(const Problem& problem, const SkipOptions& options);
/// Key blocks that lie in the ranges whole, as must_do_bits and must_skip_bits want them: (ceil(KB / 32)). `name` is
/// what errors call the ranges. Throws Error for a range that is no range of the problem's keys, or that holds no whole
/// block.
std::vector<std::uint32_t> skip_blocks(const Problem& problem, std::span<const TokenRange> ranges, const char* name);

namespace detail {
class DeviceBytes;
}

/// One layer's state for one stream of calls, in host memory or a GPU's. Allocates when it is made and in reshape(),
/// load() and save() only. Steps on a GPU neither allocate nor wait, and may be captured into a CUDA graph, each with
/// its own number. Not for several threads at once.
class SkipState {
 public:
  /// `problem`: a forward with `skip`. The state begins anew, on a GPU on its default stream. Throws Error as the two
  /// functions above do, and for a GPU that is not there.
  SkipState(const Problem& problem, SkipOptions options, Device device = {});
  SkipState(SkipState&& other) noexcept;
  SkipState& operator=(SkipState&& other) noexcept;
  ~SkipState();

  [[nodiscard]] const Problem& problem() const noexcept { return problem_; }
  [[nodiscard]] const SkipOptions& options() const noexcept { return options_; }
  [[nodiscard]] Device device() const noexcept { return device_; }
  /// The least step that bind() takes, besides 0.
  [[nodiscard]] std::int64_t next_step() const noexcept { return next_step_; }

  /// Begins anew: every tile is listed and no LSE is known. The ranges stay. On a GPU in the order of the stream.
  void reset(Stream stream = {});
  /// Begins anew for a problem of another shape, with the same rule, growth and options. The ranges are dropped: tokens
  /// are others. Throws Error and stays as it is for a problem with another rule.
  void reshape(const Problem& problem);
  /// Tokens that steps must compute or leave out from now on, rounded inward to tiles. Throws Error and stays as it is
  /// for bad ranges, for a tile in both, and if no tile is left. Waits for a GPU, and so do the functions below bind().
  void set_ranges(std::span<const TokenRange> must_do, std::span<const TokenRange> must_skip);

  /// Binds what step `step` reads and writes: the list, the memory, thresholds, ranges. Step 0 begins anew, on a GPU in
  /// the order of `stream`, which is to be the run's. The run that follows moves the state on; if it fails or is
  /// interrupted, reset() is due. Throws Error for a step below next_step() or beyond the run. The bindings are valid
  /// as long as the state, until reshape() and load().
  void bind(std::int64_t step, Bindings& bindings, Stream stream = {});

  /// Share of the tiles that the next step computes, 0 to 1; 0 where there are none.
  [[nodiscard]] double active() const;
  /// Bytes of list, memory and LSE.
  [[nodiscard]] std::size_t bytes() const noexcept;
  /// A line of what the state is and how many bytes each part has.
  [[nodiscard]] std::string describe() const;

  /// Four lines (a name, the shape as a problem's line, the layer, the next step), then list, memory and LSE in the
  /// machine's byte order. Ranges and thresholds are not in it, nor is what other shapes and types of the problem do
  /// not change.
  [[nodiscard]] std::vector<std::byte> save() const;
  /// What save() gave. Throws Error and stays as it is for other bytes, those of another problem or layer, or a list
  /// with key blocks that the problem has not.
  void load(std::span<const std::byte> saved);

 private:
  void allocate();
  /// Of the state itself: list, memory, LSE; `at` is where in its memory.
  struct Part {
    std::size_t at, bytes;
  };
  [[nodiscard]] std::vector<Part> parts() const;
  [[nodiscard]] std::vector<std::uint32_t> words() const;
  [[nodiscard]] std::string header() const;

  Problem problem_;
  SkipOptions options_;
  Device device_;
  std::int64_t next_step_ = 0;
  std::vector<float> thresholds_;             // (steps, hq)
  std::vector<std::int32_t> steps_;           // (steps): 0, 1, …
  std::size_t bit_bytes_ = 0;                 // uint32 (b, hq, QB, words)
  std::size_t code_bytes_ = 0;                // uint8 (b, hq, QB, KB)
  std::size_t lse_bytes_ = 0;                 // fp32, as lse
  std::vector<std::byte> host_;               // the three, each from a multiple of 256 bytes on; on a GPU:
  std::unique_ptr<detail::DeviceBytes> gpu_;  // the same, then thresholds, steps and both ranges' words
  std::vector<std::uint32_t> must_do_;        // (words), or empty
  std::vector<std::uint32_t> must_skip_;
};

}  // namespace tessera
