// SPDX-License-Identifier: Apache-2.0
#include "cases/inputs/inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "base/element.h"
#include "cpu/reference/number.h"
#include "tessera/error.h"

namespace tessera::cases {
namespace {

constexpr std::int64_t kGuardBytes = 128;  // before and after each tensor

std::int64_t product(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

/// In elements.
struct Extent {
  std::int64_t span;   // from the lowest to behind the highest
  std::int64_t first;  // element, from the lowest
};

/// Chooses the tensor's strides. Of (…, tokens, heads, dim) heads may be outside tokens or share rows, and tokens may
/// lie backwards.
Extent lay_out(Tensor& tensor, Strides strides, bool token_major, bool may_share) {
  const auto rank = static_cast<std::size_t>(tensor.rank);
  std::vector<std::size_t> order(rank);  // axes from innermost to outermost
  for (std::size_t i = 0; i < rank; ++i) order[i] = rank - 1 - i;
  if (strides == Strides::heads_first && token_major) std::swap(order[1], order[2]);
  Extent extent{1, 0};
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t axis = order[i];
    const bool shared = strides == Strides::zero && may_share && axis == rank - 2;
    const bool backwards = strides == Strides::negative && token_major && axis == rank - 3;
    tensor.strides[axis] = shared ? 0 : backwards ? -extent.span : extent.span;
    if (backwards) extent.first = (tensor.shape[axis] - 1) * extent.span;
    if (!shared) extent.span *= tensor.shape[axis];
    if (i == 0 && rank > 1) extent.span += strides == Strides::gaps ? 8 : strides == Strides::odd ? 1 : 0;
  }
  return extent;
}

/// Inputs whose heads may be one row: nothing that a run writes, nor what a forward wrote.
bool may_share_heads(Slot slot) {
  constexpr Slot kSlots[] = {Slot::q, Slot::k, Slot::v, Slot::k2, Slot::v2, Slot::dout, Slot::k_new, Slot::v_new};
  return std::find(std::begin(kSlots), std::end(kSlots), slot) != std::end(kSlots);
}

/// (…, heads, tokens), or (…, heads, dim) without tokens.
bool is_head_major(Slot slot) {
  constexpr Slot kSlots[] = {Slot::lse,       Slot::dlse,      Slot::prior_lse, Slot::skip_lse,
                             Slot::lse_parts, Slot::tile_mass, Slot::q_descale, Slot::k_descale,
                             Slot::v_descale, Slot::k_mean,    Slot::x_descale, Slot::x_mean};
  return std::find(std::begin(kSlots), std::end(kSlots), slot) != std::end(kSlots);
}

/// An element of N(0, 1); of 8-bit types 28 times as large, which stays within int8's range.
double draw_element(DType dtype, RandomNumbers& random) {
  const double drawn = random.normal();
  return detail::is_quantised(dtype) ? kQuantisedGain * drawn : drawn;
}

}  // namespace

bool Inputs::is_output(Slot slot) const noexcept {
  for (const Buffer& buffer : buffers_) {
    if (buffer.slot == slot) return buffer.output;
  }
  return false;
}

std::vector<Inputs::BufferView> Inputs::buffers() {
  std::vector<BufferView> views;
  for (Buffer& buffer : buffers_) {
    views.push_back({buffer.slot,
                     {buffer.memory.data(), buffer.memory.size()},
                     static_cast<std::size_t>(buffer.begin),
                     kGuardBytes});
  }
  return views;
}

Tensor& Inputs::allocate(Slot slot, DType dtype, std::vector<std::int64_t> shape, bool output) {
  Tensor& tensor = bindings_[slot];
  tensor = Tensor::contiguous(nullptr, dtype, shape.data(), static_cast<int>(shape.size()));
  const bool floating = detail::is_operand(dtype);
  const bool token_major = floating && shape.size() >= 3 && !is_head_major(slot);
  const Strides strides = floating && shape.size() >= 2 ? values_.strides : Strides::packed;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const bool may_share = token_major && !output && may_share_heads(slot);
  const Extent extent = product(shape) == 0 ? Extent{} : lay_out(tensor, strides, token_major, may_share);
  const std::int64_t begin = kGuardBytes + (strides == Strides::gaps ? element : 0);
  const auto bytes = static_cast<std::size_t>(begin + extent.span * element + kGuardBytes);
  const std::uint64_t kind = values_.seed + static_cast<std::uint64_t>(slot);
  buffers_.push_back({slot, output, begin, PoisonedMemory(bytes, dtype, kind), {}});
  tensor.data = buffers_.back().memory.data();
  tensor.byte_offset = begin + extent.first * element;
  return tensor;
}

Tensor& Inputs::allocate_integers(Slot slot, const std::vector<std::int64_t>& values, DType dtype) {
  Tensor& tensor = allocate(slot, dtype, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) {
    reference::write(tensor, static_cast<std::int64_t>(i), static_cast<double>(values[i]));
  }
  return tensor;
}

std::vector<std::int64_t> Inputs::query_shape(std::int64_t heads, std::int64_t dim) const {
  if (problem_.q_layout == Layout::varlen) return {problem_.total_q, heads, dim};
  return {problem_.batch, problem_.seqlen_q, heads, dim};
}

std::vector<std::int64_t> Inputs::lse_shape() const {
  if (problem_.q_layout == Layout::varlen) return {problem_.heads_q, problem_.total_q};
  return {problem_.batch, problem_.heads_q, problem_.seqlen_q};
}

void Inputs::fill(Slot slot) {
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
  const Tensor& tensor = bindings_[slot];
  reference::for_each_element(
      tensor, [&](std::int64_t, std::int64_t offset) { reference::write(tensor, offset, random.normal()); });
}

/// Rows in use; padding and slack stay poisoned.
void Inputs::fill_queries(Slot slot) {
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
  const Tensor& tensor = bindings_[slot];
  const auto last = static_cast<std::size_t>(tensor.rank - 1);
  for (const reference::Rows& rows : sequences_.query) {
    for (std::int64_t i = 0; i < rows.length; ++i) {
      for (std::int64_t h = 0; h < tensor.shape[last - 1]; ++h) {
        const std::int64_t at = reference::token_offset(tensor, rows.first_token + i, h);
        for (std::int64_t c = 0; c < tensor.shape[last]; ++c) {
          reference::write(tensor, at + c, draw_element(tensor.dtype, random));
        }
      }
    }
  }
}

void Inputs::fill_keys(std::size_t segment) {
  const reference::SegmentSlots& slots = reference::segment_slots(segment);
  for (const Slot slot : {slots.k, slots.v}) {
    RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
    const Tensor& tensor = bindings_[slot];
    const std::int64_t dim = tensor.shape[static_cast<std::size_t>(tensor.rank - 1)];
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const reference::Rows& rows = sequences_.keys[segment][static_cast<std::size_t>(b)];
      for (std::int64_t j = 0; j < rows.length; ++j) {
        const std::int64_t token = reference::key_token(problem_, bindings_, segment, b, rows, j);
        for (std::int64_t h = 0; h < problem_.heads_kv; ++h) {
          const std::int64_t at = reference::token_offset(tensor, token, h);
          for (std::int64_t c = 0; c < dim; ++c) {
            reference::write(tensor, at + c, draw_element(tensor.dtype, random));
          }
        }
      }
    }
  }
}

namespace {

void put_nan(const Tensor& tensor, std::int64_t at, std::int64_t kind) {
  const std::uint32_t bits = nan_bits(tensor.dtype, static_cast<std::uint64_t>(kind));
  const std::size_t element = size_of(tensor.dtype);
  std::memcpy(tensor.bytes() + at * static_cast<std::int64_t>(element), &bits, element);
}

}  // namespace

/// Queries of non_finite_rows with this parity are NaN of several kinds in `slot`, in all columns.
void Inputs::set_non_finite_rows(Slot slot, std::int64_t parity) {
  const Tensor& tensor = bindings_[slot];
  const std::int64_t dim = tensor.shape[static_cast<std::size_t>(tensor.rank - 1)];
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const reference::Rows& rows = sequences_.query[static_cast<std::size_t>(b)];
    for (const std::int64_t i : values_.non_finite_rows) {
      if (i % 2 != parity || i >= rows.length) continue;
      const std::int64_t token = rows.first_token + i;
      for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
        const std::int64_t at = reference::token_offset(tensor, token, h);
        for (std::int64_t c = 0; c < dim; ++c) put_nan(tensor, at + c, i + c);
      }
    }
  }
}

/// V of a non_finite key holds NaN of several kinds, ∞, −∞ and a number by turns; K of an odd one is NaN of one kind.
void Inputs::set_non_finite_keys() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Tensor& k = bindings_[Slot::k];
  const Tensor& v = bindings_[Slot::v];
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const reference::Rows& rows = sequences_.keys[0][static_cast<std::size_t>(b)];
    for (const std::int64_t j : values_.non_finite) {
      if (j >= rows.length) continue;
      const std::int64_t token = reference::key_token(problem_, bindings_, 0, b, rows, j);
      for (std::int64_t h = 0; h < problem_.heads_kv; ++h) {
        const std::int64_t v_at = reference::token_offset(v, token, h);
        for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) {
          if (c % 4 == 0) put_nan(v, v_at + c, j + c / 4);
          if (c % 4 == 1 || c % 4 == 2) reference::write(v, v_at + c, c % 4 == 1 ? kInfinity : -kInfinity);
        }
        const std::int64_t k_at = reference::token_offset(k, token, h);
        for (std::int64_t c = 0; j % 2 == 1 && c < problem_.head_dim_qk; ++c) put_nan(k, k_at + c, j / 2 + b + h);
      }
    }
  }
}

void Inputs::fill_lse(Slot slot, double mean, double deviation, double share_empty) {
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
  const Tensor& tensor = bindings_[slot];
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const reference::Rows& rows = sequences_.query[static_cast<std::size_t>(b)];
    for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
      for (std::int64_t i = 0; i < rows.length; ++i) {
        const double value = mean + deviation * static_cast<double>(random.normal());
        reference::write(tensor, reference::lse_offset(tensor, b, h, rows, i),
                         random.chance(share_empty) ? -std::numeric_limits<double>::infinity() : value);
      }
    }
  }
}

void Inputs::remember() {
  for (Buffer& buffer : buffers_) {
    buffer.remembered.assign(buffer.memory.data(), buffer.memory.data() + buffer.memory.size());
  }
}

void Inputs::restore() {
  for (Buffer& buffer : buffers_) {
    if (buffer.output) std::memcpy(buffer.memory.data(), buffer.remembered.data(), buffer.remembered.size());
  }
}

std::string Inputs::find_damage(const reference::Result& expected) const {
  for (const Buffer& buffer : buffers_) {
    const std::byte* now = buffer.memory.data();
    std::vector<std::byte> allowed = buffer.remembered;
    const Tensor& tensor = bindings_[buffer.slot];
    if (buffer.output) {
      const reference::Output& output = expected[buffer.slot];
      const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
      reference::for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
        if (output.written[static_cast<std::size_t>(index)] == 0) return;
        const auto at = static_cast<std::size_t>(tensor.byte_offset + offset * element);
        std::memcpy(&allowed[at], now + at, static_cast<std::size_t>(element));
      });
    }
    if (std::memcmp(allowed.data(), now, allowed.size()) == 0) continue;
    std::size_t at = 0;
    while (allowed[at] == now[at]) ++at;
    return fmt::format("{} of {}: byte {} of a buffer of {} whose tensor starts at {} was changed",
                       buffer.output ? "surroundings or untouchable part" : "input", tessera::to_string(buffer.slot),
                       at, allowed.size(), tensor.byte_offset);
  }
  return "";
}

}  // namespace tessera::cases
