// SPDX-License-Identifier: Apache-2.0
#include "cases/inputs/poison.h"

#include <cstring>
#include <new>
#include <vector>

#include "cpu/reference/sequences.h"

namespace tessera::cases {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::uint32_t kFp32[kNanKinds] = {0x7FC00000, 0xFFFFFFFF, 0x7FC00001, 0xFFC001FF, 0x7F800001, 0xFFBFFFFF};
constexpr std::uint32_t kBf16[kNanKinds] = {0x7FC0, 0xFFFF, 0x7FC1, 0xFFC7, 0x7F81, 0xFFBF};
constexpr std::uint32_t kFp16[kNanKinds] = {0x7E00, 0xFFFF, 0x7E01, 0xFE1F, 0x7C01, 0xFDFF};

}  // namespace

std::uint32_t nan_bits(DType dtype, std::uint64_t kind) noexcept {
  return (dtype == DType::fp32 ? kFp32 : dtype == DType::bf16 ? kBf16 : kFp16)[kind % kNanKinds];
}

void poison(std::span<std::byte> bytes, DType dtype, std::uint64_t kind) noexcept {
  if (dtype != DType::fp32 && dtype != DType::bf16 && dtype != DType::fp16) {
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
