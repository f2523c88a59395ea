// SPDX-License-Identifier: Apache-2.0
// A non-owning view of memory: dtype, device, int64 shape and strides, byte offset, as in DLPack.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

struct DLTensor;  // DLPack 0.x/1.x; its layout is declared in src/base/dlpack.h

namespace tessera {

enum class DType : std::uint8_t {
  fp64,
  fp32,
  fp16,
  bf16,
  e4m3,  // fp8: 4 exponent and 3 mantissa bits, no infinity (OCP OFP8)
  e5m2,
  int8,
  int32,
  int64,
  uint8,
  uint32,
  uint64,
};

/// Bytes of one element.
std::size_t size_of(DType dtype) noexcept;
/// "bf16", "fp32", … as in the problem grammar.
std::string_view to_string(DType dtype) noexcept;
/// The inverse of to_string. Throws Error{parse} naming `argument`.
DType parse_dtype(std::string_view text, std::string_view argument = "dtype");

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

std::string to_string(Device device);

/// A view; copying it copies no data. A default-constructed Tensor is unbound (bool false).
/// A bound tensor with a zero-sized dimension may have data == nullptr.
struct Tensor {
  static constexpr int kMaxRank = 6;

  void* data = nullptr;
  DType dtype = DType::fp32;
  Device device;
  int rank = -1;  // -1: unbound
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  // in elements
  std::int64_t byte_offset = 0;                  // added to data before use

  Tensor() = default;
  /// Contiguous (row-major) view. Throws Error{invalid_argument} on a negative size or too many dimensions,
  /// Error{overflow} when the element count times the element size does not fit in int64.
  static Tensor contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {});
  static Tensor contiguous(void* data, DType dtype, const std::int64_t* shape, int rank, Device device = {});
  /// View with strides in elements.
  static Tensor strided(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides, Device device = {});

  explicit operator bool() const noexcept { return rank >= 0; }
  /// First element: data + byte_offset.
  [[nodiscard]] std::byte* bytes() const noexcept { return static_cast<std::byte*>(data) + byte_offset; }
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return reinterpret_cast<T*>(bytes());
  }
  /// Number of elements. Throws Error{overflow}.
  [[nodiscard]] std::int64_t numel() const;
  [[nodiscard]] bool is_contiguous() const noexcept;
  /// "bf16 (2, 128, 8, 64) on cpu"
  [[nodiscard]] std::string describe() const;

  /// Conversions from and to DLPack; `argument` is the tensor's name in errors. from_dlpack copies shape and strides;
  /// the data must outlive the view. Lanes must be 1. It throws Error{invalid_argument} for a device, type or rank that
  /// Tessera does not have, and Error{overflow} for sizes that do not fit in 64 bits. to_dlpack fills `target`; its
  /// shape and strides point into this Tensor, which must outlive it. It throws Error{invalid_argument} if this Tensor
  /// is unbound.
  static Tensor from_dlpack(const DLTensor& source, std::string_view argument = "tensor");
  void to_dlpack(DLTensor& target) const;
};

}  // namespace tessera
