// SPDX-License-Identifier: Apache-2.0
// A skip state: a tile list that lives across the steps of a diffusion run, with the data from which each step makes
// the next step's list (docs/skip-state.md).
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

/// Key tokens [begin, end). Those of a second source are counted from kv.seqlen on.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const TokenRange&) const = default;
};

/// Parameters of a skip state, besides its problem.
struct SkipOptions {
  /// Thresholds of the first and the last step. With skip=mass they are masses above 0 and below 4, and the steps
  /// between them are in geometric progression. With skip=threshold they are base-2 logarithms from −100 to 0, and the
  /// progression is arithmetic.
  struct Ramp {
    float first = 0;
    float last = 0;
    bool operator==(const Ramp&) const = default;
  };
  struct Head {
    std::int64_t head = 0;  // query head
    Ramp ramp;
  };

  std::int64_t steps = 50;   // steps of a run, 1 to 2^20
  std::int64_t warm_up = 2;  // number of first steps that keep every tile they compute
  Ramp ramp{0.002F, 0.012F};
  std::vector<Head> heads = {};  // query heads with other thresholds
  std::string layer = {};        // name of the layer, without line breaks; load() refuses another layer's file
};

/// Thresholds θ of every step and query head, (steps, hq), as base-2 logarithms: docs/skip-state.md, section 4. Throws
/// Error for a problem without `skip`, and for options out of range.
std::vector<float> skip_thresholds(const Problem& problem, const SkipOptions& options);
/// Key blocks that lie wholly in one of the ranges, as bits for must_do_bits and must_skip_bits: (ceil(KB / 32)).
/// `name` is the name of the ranges in errors. Throws Error for a problem without `skip`, for a range outside of the
/// problem's keys, and for a range that is not empty but holds no whole block.
std::vector<std::uint32_t> skip_blocks(const Problem& problem, std::span<const TokenRange> ranges, const char* name);

namespace detail {
class DeviceBytes;
}

/// One layer's state for one stream of calls, in host memory or a GPU's. Only the constructor and reshape() allocate
/// the state's memory. Steps on a GPU neither allocate nor wait, and can be captured into a CUDA graph; a captured step
/// keeps its number. One thread at a time may use a state.
class SkipState {
 public:
  /// `problem`: a forward with `skip`. The new state is as after reset(), on a GPU in the order of its default stream.
  /// Throws Error as skip_thresholds() does, and for a GPU that is not there.
  SkipState(const Problem& problem, SkipOptions options, Device device = {});
  SkipState(SkipState&& other) noexcept;
  SkipState& operator=(SkipState&& other) noexcept;
  ~SkipState();

  [[nodiscard]] const Problem& problem() const noexcept { return problem_; }
  [[nodiscard]] const SkipOptions& options() const noexcept { return options_; }
  [[nodiscard]] Device device() const noexcept { return device_; }
  /// The lowest step that bind() takes, besides 0.
  [[nodiscard]] std::int64_t next_step() const noexcept { return next_step_; }

  /// Starts again: every tile is listed and no LSE is known. The ranges stay. On a GPU this happens in the order of
  /// `stream`.
  void reset(Stream stream = {});
  /// Starts again for a problem of another shape, with the same `skip` rule and options. The ranges are dropped,
  /// because the tokens are others. Throws Error for a problem with another rule; the state then is unchanged.
  void reshape(const Problem& problem);
  /// Sets the tokens that steps must compute and those that they must leave out from now on, rounded inward to tiles.
  /// Throws Error for ranges that skip_blocks() refuses, for a tile in both, and if no tile is left; the state then is
  /// unchanged. On a GPU this waits for the device, and so do active(), save() and load().
  void set_ranges(std::span<const TokenRange> must_do, std::span<const TokenRange> must_skip);

  /// Binds the tensors that step `step` reads and writes: list, masses, LSE, thresholds and ranges. Step 0 calls
  /// reset(stream) first; `stream` must be that of the run. The run that follows advances the state; if it fails or is
  /// interrupted, reset() is due. Throws Error for a step below next_step(), except 0, and for one beyond the run. The
  /// bindings are valid as long as the state, until set_ranges(), reshape() or load().
  void bind(std::int64_t step, Bindings& bindings, Stream stream = {});

  /// Share of the tiles that the next step computes, 0 to 1; 0 if there are no tiles.
  [[nodiscard]] double active() const;
  /// Bytes of list, masses and LSE.
  [[nodiscard]] std::size_t bytes() const noexcept;
  /// One line: the layer, the bytes of each part, the next step and the problem.
  [[nodiscard]] std::string describe() const;

  /// Four lines (a format name, the shape as a problem line, the layer, the next step), then list, masses and LSE in
  /// the machine's byte order. Ranges and thresholds are not saved, nor are fields of the problem that do not change
  /// the state's shape or rule.
  [[nodiscard]] std::vector<std::byte> save() const;
  /// Restores what save() returned. Throws Error for other bytes, for those of another problem, layer or longer run,
  /// and for a list with key blocks that the problem does not have; the state then is unchanged.
  void load(std::span<const std::byte> saved);

 private:
  void allocate();
  /// A part of what save() writes (list, masses or LSE): its offset in the state's memory, and its bytes.
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
  std::vector<std::byte> host_;               // on the CPU: the three, each at a multiple of 256 bytes
  std::unique_ptr<detail::DeviceBytes> gpu_;  // on a GPU: the same, then thresholds, steps and ranges
  std::vector<std::uint32_t> must_do_;        // (words), or empty
  std::vector<std::uint32_t> must_skip_;
};

}  // namespace tessera
