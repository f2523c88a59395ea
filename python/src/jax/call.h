// SPDX-License-Identifier: Apache-2.0
// One call of XLA: its attributes, its buffers as tensors, and what its device offers.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "jax/abi.h"
#include "tessera/tensor.h"

namespace tessera::python::xla {

/// A view of a call's frame; throws Error for what is not as `tessera.jax` makes it.
class Call {
 public:
  explicit Call(const CallFrame& frame) : frame_(frame) {}

  [[nodiscard]] std::string_view text(std::string_view attribute) const;
  [[nodiscard]] std::span<const std::int64_t> numbers(std::string_view attribute) const;
  [[nodiscard]] std::int64_t arguments() const noexcept { return frame_.arguments.size; }
  [[nodiscard]] std::int64_t results() const noexcept { return frame_.results.size; }
  /// Row-major, on `device`.
  [[nodiscard]] Tensor argument(std::int64_t index, Device device) const;
  [[nodiscard]] Tensor result(std::int64_t index, Device device) const;

  /// Of a GPU: its number, the stream to compute on.
  [[nodiscard]] int ordinal() const;
  [[nodiscard]] void* stream() const;

  /// Memory of XLA's allocator on a GPU, 256-byte aligned, given back in the order of the stream. None for 0 bytes.
  class Scratch {
   public:
    Scratch(const Call& call, std::size_t bytes);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    [[nodiscard]] void* data() const noexcept;

   private:
    const CallFrame& frame_;
    std::size_t bytes_;
    void* given_ = nullptr;
  };

 private:
  [[nodiscard]] const void* attribute(std::string_view name, std::int32_t kind) const;
  const CallFrame& frame_;
};

/// Answers XLA's question for metadata, which it asks before the first call. Whether it was one.
bool tell_metadata(const CallFrame& frame) noexcept;

/// What a handler returns in place of throwing.
Failure* failure_of(const CallFrame& frame, Code code, const char* message) noexcept;

}  // namespace tessera::python::xla
