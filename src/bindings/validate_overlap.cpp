// SPDX-License-Identifier: Apache-2.0
// Checks that elements which must be apart do not share an address.
#include <algorithm>
#include <cstdlib>

#include "base/checked.h"
#include "bindings/validate_parts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

struct Dimension {
  std::int64_t size = 0;
  std::int64_t stride = 0;  // bytes, absolute
};

/// Dimensions of more than one element, longest stride first.
struct Dimensions {
  std::array<Dimension, Tensor::kMaxRank> at{};
  std::size_t count = 0;
  std::int64_t element = 0;
  std::int64_t begin = 0;  // lowest address: absolute strides all count upwards from it

  Dimensions(const Tensor& tensor, const Span& span)
      : element(static_cast<std::int64_t>(size_of(tensor.dtype))), begin(span.begin) {
    for (int i = 0; i < tensor.rank; ++i) {
      const auto axis = static_cast<std::size_t>(i);
      if (tensor.shape[axis] > 1) at[count++] = {tensor.shape[axis], std::abs(tensor.strides[axis]) * element};
    }
    std::sort(at.begin(), at.begin() + static_cast<std::ptrdiff_t>(count),
              [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  }
};

/// Two elements share an address if Σ δ·stride = 0 for differences of indices δ, not all 0, with |δ| < size. Nested
/// strides, which nearly all tensors have, need no search. A tensor that needs a longer search than the budget is taken
/// to overlap.
class SelfOverlap {
 public:
  explicit SelfOverlap(const Dimensions& dimensions) : d_(dimensions) {
    for (std::size_t i = d_.count; i-- > 0;) reach_[i] = reach_[i + 1] + (d_.at[i].size - 1) * d_.at[i].stride;
  }
  bool found() {
    if (is_nested()) return false;
    return (d_.count > 0 && d_.at[d_.count - 1].stride == 0) || search(0, 0, false);
  }

 private:
  /// Whether each stride is longer than the reach of all shorter ones. This is the common case, and the test needs no
  /// division.
  [[nodiscard]] bool is_nested() const {
    for (std::size_t i = 0; i < d_.count; ++i) {
      if (d_.at[i].stride <= reach_[i + 1]) return false;
    }
    return true;
  }

  bool search(std::size_t level, std::int64_t sum, bool moved) {
    if (level == d_.count) return moved && sum == 0;
    const Dimension& dimension = d_.at[level];
    const std::int64_t rest = reach_[level + 1];
    const std::int64_t most = dimension.size - 1;
    // −rest ≤ sum + δ·stride ≤ rest
    const std::int64_t low = std::max(-most, -((rest + sum) / dimension.stride) - 1);
    const std::int64_t high = std::min(most, (rest - sum) / dimension.stride + 1);
    for (std::int64_t delta = low; delta <= high; ++delta) {
      const std::int64_t next = sum + delta * dimension.stride;
      if (std::abs(next) > rest) continue;
      if (budget_-- <= 0 || search(level + 1, next, moved || delta != 0)) return true;
    }
    return false;
  }

  const Dimensions& d_;
  std::array<std::int64_t, Tensor::kMaxRank + 1> reach_{};
  int budget_ = 4096;
};

/// The offsets of a tensor modulo `period` lie in [start, start + length); nullopt if they do not fit one period.
struct Residues {
  std::int64_t start = 0;
  std::int64_t length = 0;
};
std::optional<Residues> residues(const Dimensions& d, std::int64_t period) noexcept {
  std::int64_t length = d.element;
  for (std::size_t i = 0; i < d.count; ++i) {
    if (d.at[i].stride < period) {
      length += (d.at[i].size - 1) * d.at[i].stride;
    } else if (d.at[i].stride % period != 0) {
      return std::nullopt;
    }
  }
  if (length > period) return std::nullopt;
  return Residues{d.begin % period, length};
}

/// Interleaved views, such as dq, dk and dv inside one (batch, seqlen, 3, heads, dim) buffer, span the same addresses
/// but share none: modulo a common stride, they lie in different parts of it.
bool are_interleaved(const Dimensions& a, const Dimensions& b) noexcept {
  const auto apart = [&](std::int64_t period) {
    if (period == 0) return false;
    const auto x = residues(a, period);
    const auto y = residues(b, period);
    if (!x || !y) return false;
    const std::int64_t distance = (y->start - x->start + period) % period;
    return distance >= x->length && period - distance >= y->length;
  };
  for (const Dimensions* d : {&a, &b}) {
    for (std::size_t i = 0; i < d->count; ++i) {
      if (apart(d->at[i].stride)) return true;
    }
  }
  return false;
}

/// Whether two tensors with these spans may share an element.
bool may_overlap(const Tensor& a, const Span& x, const Tensor& b, const Span& y) noexcept {
  return x.meets(y) && !are_interleaved(Dimensions(a, x), Dimensions(b, y));
}

/// The same elements at the same addresses.
bool is_same_view(const Tensor& a, const Tensor& b) noexcept {
  if (a.bytes() != b.bytes() || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.rank); ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

Tensor part_of(const Tensor& parts, std::int64_t part) noexcept {
  Tensor out = parts;
  out.rank = parts.rank - 1;
  for (std::size_t i = 0; i < static_cast<std::size_t>(out.rank); ++i) {
    out.shape[i] = parts.shape[i + 1];
    out.strides[i] = parts.strides[i + 1];
  }
  out.data = parts.bytes() + part * parts.strides[0] * static_cast<std::int64_t>(size_of(parts.dtype));
  out.byte_offset = 0;
  return out;
}

[[noreturn]] void refuse(Slot output, Slot other) {
  throw Error(ErrorCode::invalid_argument, std::string(to_string(output)),
              "memory shared with " + std::string(to_string(other)), "memory of its own");
}

/// Parts may lie anywhere relative to each other, so each is checked by itself. The result may overwrite part 0.
void check_against_parts(const BoundSlot& output, const BoundSlot& parts) {
  const bool in_place = (output.slot == Slot::o && parts.slot == Slot::o_parts) ||
                        (output.slot == Slot::lse && parts.slot == Slot::lse_parts);
  for (std::int64_t i = 0; i < parts.tensor->shape[0]; ++i) {
    const Tensor part = part_of(*parts.tensor, i);
    if (!may_overlap(*output.tensor, output.span, part, span_of(part).value_or(Span{}))) continue;
    if (!(in_place && i == 0 && is_same_view(*output.tensor, part))) refuse(output.slot, parts.slot);
  }
}

void check_against(const BoundSlot& output, const BoundSlot& other) {
  if (!output.span.meets(other.span)) return;  // nearly always
  if (other.slot == Slot::o_parts || other.slot == Slot::lse_parts) {
    check_against_parts(output, other);
  } else if (may_overlap(*output.tensor, output.span, *other.tensor, other.span)) {
    refuse(output.slot, other.slot);
  }
}

}  // namespace

void check_overlaps(std::span<const BoundSlot> bound) {
  for (std::size_t i = 0; i < bound.size(); ++i) {
    const BoundSlot& output = bound[i];
    if (!output.written || output.span.begin == output.span.end) continue;
    if (SelfOverlap(Dimensions(*output.tensor, output.span)).found()) {
      throw Error(ErrorCode::invalid_argument, std::string(to_string(output.slot)), output.tensor->describe(),
                  "strides under which no two elements share an address");
    }
    for (std::size_t j = 0; j < bound.size(); ++j) {
      // Two outputs are compared once, at the later of them.
      if (i != j && !(bound[j].written && j > i)) check_against(output, bound[j]);
    }
  }
}

}  // namespace tessera::detail
