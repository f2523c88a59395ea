// SPDX-License-Identifier: Apache-2.0
#include "cases/inputs/poison.h"

#include <cstring>
#include <new>
#include <vector>

#include "base/element.h"
#include "cpu/reference/number.h"
#include "cpu/reference/sequences.h"

namespace tessera::cases {
namespace {

constexpr std::size_t kAlignment = 64;

}  // namespace

std::uint32_t nan_bits(DType dtype, std::uint64_t kind) noexcept {
  if (size_of(dtype) == 1 && dtype != DType::e5m2) return kind % 2 == 0 ? 0x7FU : 0xFFU;  // int8 has no NaN
  const reference::Format format = reference::format_of(dtype);
  const std::uint32_t quiet = 1U << (format.digits - 1);
  const std::uint32_t infinity = ((1U << format.exponent_bits) - 1U) << format.digits;
  const std::uint32_t sign = 1U << (format.digits + format.exponent_bits);
  const std::uint32_t low_half = (1U << format.digits / 2) - 1U;
  const std::uint32_t kinds[kNanKinds] = {infinity | quiet,      sign | infinity | (2 * quiet - 1U),
                                          infinity | quiet | 1U, sign | infinity | quiet | low_half,
                                          infinity | 1U,         sign | infinity | (quiet - 1U)};
  return kinds[kind % kNanKinds];
}

void poison(std::span<std::byte> bytes, DType dtype, std::uint64_t kind) noexcept {
  if (!detail::is_result(dtype)) {
    std::memset(bytes.data(), 0xFF, bytes.size());
    return;
  }
  const std::uint32_t bits = nan_bits(dtype, kind);
  const std::size_t element = size_of(dtype);
  for (std::size_t at = 0; at + element <= bytes.size(); at += element) std::memcpy(&bytes[at], &bits, element);
}

void poison_unused_keys(const Problem& problem, const Bindings& bindings) {
  const reference::Sequences sequences = reference::resolve_sequences(problem, bindings);
  for (std::size_t segment = 0; segment < sequences.keys.size(); ++segment) {
    std::vector<bool> used(static_cast<std::size_t>(sequences.key_tokens[segment]), false);
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const reference::Rows& rows = sequences.keys[segment][static_cast<std::size_t>(b)];
      for (std::int64_t j = 0; j < rows.length; ++j) {
        used[static_cast<std::size_t>(reference::key_token(problem, bindings, segment, b, rows, j))] = true;
      }
    }
    const reference::SegmentSlots& slots = reference::segment_slots(segment);
    for (const Slot slot : {slots.k, slots.v}) {
      const Tensor& tensor = bindings[slot];
      const auto dim = static_cast<std::size_t>(tensor.shape[static_cast<std::size_t>(tensor.rank - 1)]);
      const std::size_t element = size_of(tensor.dtype);
      for (std::size_t token = 0; token < used.size(); ++token) {
        for (std::int64_t h = 0; !used[token] && h < problem.heads_kv; ++h) {
          const std::int64_t at = reference::token_offset(tensor, static_cast<std::int64_t>(token), h);
          poison({tensor.bytes() + at * static_cast<std::int64_t>(element), dim * element}, tensor.dtype, token);
        }
      }
    }
  }
}

PoisonedMemory::PoisonedMemory(std::size_t bytes, DType dtype, std::uint64_t kind)
    : bytes_(bytes), data_(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kAlignment}))) {
  poison({data_.get(), bytes_}, dtype, kind);
}

void PoisonedMemory::Free::operator()(std::byte* memory) const noexcept {
  ::operator delete[](memory, std::align_val_t{kAlignment});
}

}  // namespace tessera::cases
