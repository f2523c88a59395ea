// SPDX-License-Identifier: Apache-2.0
// Checks one tensor against the rule of its slot.
#include <algorithm>

#include "base/checked.h"
#include "bindings/validate_parts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

[[noreturn]] void refuse(std::string_view name, std::string got, std::string want,
                         ErrorCode code = ErrorCode::invalid_argument) {
  throw Error(code, std::string(name), std::move(got), std::move(want));
}

bool dtype_fits(const SlotRule& rule, DType dtype) noexcept {
  if (dtype == rule.dtype) return true;
  return (rule.or_fp32 && dtype == DType::fp32) || (rule.or_int64 && dtype == DType::int64);
}

bool shape_fits(const SlotRule& rule, const Tensor& tensor) noexcept {
  const int skipped = rule.leading_batch && tensor.rank == rule.rank - 1 ? 1 : 0;
  if (tensor.rank != rule.rank - skipped) return false;
  for (int i = 0; i < tensor.rank; ++i) {
    const std::int64_t got = tensor.shape[static_cast<std::size_t>(i)];
    const std::int64_t want = rule.shape[static_cast<std::size_t>(i + skipped)];
    const bool larger = (rule.at_least >> (i + skipped) & 1U) != 0;
    if (larger ? got < want : got != want) return false;
  }
  return true;
}

bool is_empty(const Tensor& tensor) noexcept {
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[static_cast<std::size_t>(i)] == 0) return true;
  }
  return false;
}

/// Whether all byte offsets are within 2^60, also those of empty tensors, because backends form offsets before they
/// test for emptiness. The stride of a dimension of one element is ignored.
bool strides_fit(const Tensor& tensor) noexcept {
  const std::int64_t limit = kMaxPosition / static_cast<std::int64_t>(size_of(tensor.dtype));
  std::int64_t reach = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.rank); ++i) {
    if (tensor.shape[i] <= 1) continue;
    const std::int64_t stride = tensor.strides[i];
    if (stride > limit || stride < -limit) return false;
    const auto dimension = checked_multiply(tensor.shape[i], stride < 0 ? -stride : stride);
    if (!dimension || *dimension > limit - reach) return false;
    reach += *dimension;
  }
  return true;
}

/// The span of a tensor whose strides fit; nullopt if the addresses cannot be formed.
std::optional<Span> span_of_fitting(const Tensor& tensor) noexcept {
  std::int64_t low = 0;  // in elements, from the first
  std::int64_t high = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (tensor.shape[at] == 0) return Span{};
    const std::int64_t reach = (tensor.shape[at] - 1) * tensor.strides[at];
    (reach < 0 ? low : high) += reach;
  }
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  const auto base =
      checked_add(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data)), tensor.byte_offset);
  if (!base) return std::nullopt;
  const auto begin = checked_add(*base, low * element);
  const auto end = checked_add(*base, (high + 1) * element);
  if (!begin || !end || *begin < 0) return std::nullopt;
  return Span{*begin, *end};
}

Span check_memory(std::string_view name, const Tensor& tensor) {
  if (tensor.byte_offset < 0) refuse(name, "byte offset " + std::to_string(tensor.byte_offset), "0 or more");
  if (!strides_fit(tensor)) {
    refuse(name, tensor.describe(), "strides that span at most 2^60 bytes", ErrorCode::overflow);
  }
  if (is_empty(tensor)) return {};
  if (tensor.data == nullptr) refuse(name, "nullptr", "memory for " + tensor.describe());
  const auto last = static_cast<std::size_t>(tensor.rank - 1);
  if (tensor.rank > 0 && tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    refuse(name, "stride " + std::to_string(tensor.strides[last]) + " in the last dimension",
           "1, the last dimension contiguous");
  }
  const auto span = span_of_fitting(tensor);
  if (!span) refuse(name, tensor.describe(), "addresses that exist", ErrorCode::overflow);
  const auto element = static_cast<std::uintptr_t>(size_of(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.bytes()) % element != 0) {
    refuse(name, "a misaligned address", "a multiple of " + std::to_string(element) + " bytes");
  }
  return *span;
}

constexpr std::int64_t kRowAlignment = 16;  // bytes of the widest load
constexpr std::int64_t kWidestLoad = 8;     // elements of it in 16 bits; other rows are moved element by element

}  // namespace

std::optional<Span> span_of(const Tensor& tensor) noexcept {
  return strides_fit(tensor) ? span_of_fitting(tensor) : std::nullopt;
}

Span check_tensor(std::string_view name, const SlotRule& rule, const Tensor& tensor, Device device) {
  if (tensor.rank > Tensor::kMaxRank) {
    refuse(name, std::to_string(tensor.rank) + " dimensions", describe(rule));
  }
  if (!dtype_fits(rule, tensor.dtype) || !shape_fits(rule, tensor)) refuse(name, tensor.describe(), describe(rule));
  const bool there =
      tensor.device.type == device.type && (device.type == DeviceType::cpu || tensor.device.index == device.index);
  if (!there) refuse(name, tensor.describe(), describe(rule) + " on " + to_string(device));
  return check_memory(name, tensor);
}

void check_rows(Slot slot, const Tensor& tensor) {
  if (!has_rows(slot) || is_empty(tensor)) return;
  if (tensor.shape[static_cast<std::size_t>(tensor.rank - 1)] % kWidestLoad != 0) return;  // element by element
  const std::string_view name = to_string(slot);
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t alignment = std::min(kRowAlignment, kWidestLoad * element);  // 8 bytes for 8-bit elements
  const std::string bytes = std::to_string(alignment) + " bytes";
  if (reinterpret_cast<std::uintptr_t>(tensor.bytes()) % static_cast<std::uintptr_t>(alignment) != 0) {
    refuse(name, "an address that is no multiple of " + bytes, "rows aligned to " + bytes + " on cuda");
  }
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(tensor.rank); ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] * element % alignment != 0) {
      refuse(name,
             "a stride of " + std::to_string(tensor.strides[i] * element) + " bytes in dimension " + std::to_string(i),
             "a multiple of " + bytes + " on cuda");
    }
  }
}

}  // namespace tessera::detail
