// SPDX-License-Identifier: Apache-2.0
// A part of a GPU's multiprocessors (a green context of CUDA 12.4 and newer), to measure as on a smaller chip with the
// same memory.
#pragma once

namespace tessera::cli {

class GreenContext {
 public:
  /// Its context is the calling thread's current one while this lives. Throws Error{invalid_argument} for a count that
  /// the device does not have, Error{unsupported} for a driver without green contexts.
  GreenContext(int device, int multiprocessors);
  ~GreenContext();
  GreenContext(const GreenContext&) = delete;
  GreenContext& operator=(const GreenContext&) = delete;

  /// As many as asked for or, as they are dealt out in groups (of 8 on SM90), a few more.
  [[nodiscard]] int multiprocessors() const noexcept { return multiprocessors_; }

 private:
  int multiprocessors_ = 0;
};

}  // namespace tessera::cli
