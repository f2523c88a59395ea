// SPDX-License-Identifier: Apache-2.0
// The oracle's quantize. Its x_quantized is within the range of the type, but not rounded: store() rounds it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "cpu/reference/descales.h"
#include "cpu/reference/linear.h"
#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

/// Numbers are out of range from half a step above the largest one on, the tie included.
struct Range {
  double largest;
  double end;
};
Range range_of(DType dtype) {
  if (dtype == DType::int8) return {127, 127.5};
  const Format format = format_of(dtype);
  return {format.largest, format.largest + std::ldexp(1.0, std::ilogb(format.largest) - format.digits - 1)};
}

/// Descales are at least the smallest normal number, so that no number is divided by 0.
constexpr double kLeastDescale = 0x1p-126;

template <class Real>
class Quantizer {
 public:
  Quantizer(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order)
      : p_(problem), in_(bindings), result_(result), order_(order), range_(range_of(problem.o_type)) {
    const Tensor& seed = in_[Slot::dropout_seed];
    const std::uint64_t bits = seed ? *seed.as<std::uint64_t>() : in_.seed;
    key_ = {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32)};
  }

  void run() {
    const Sequences sequences = resolve_sequences(p_, in_);
    const std::int64_t d = p_.head_dim_qk;
    result_[Slot::x_quantized].resize(sequences.query_tokens * p_.heads_q * d);
    if (p_.quantization.smooth) result_[Slot::x_mean].resize(p_.batch * p_.heads_q * d);
    if (!p_.quantization.given) {
      std::int64_t count = 1;
      for (int i = 0; i < in_[Slot::x_descale].rank; ++i)
        count *= in_[Slot::x_descale].shape[static_cast<std::size_t>(i)];
      result_[Slot::x_descale].resize(count);
    }
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      const Rows& rows = sequences.query[static_cast<std::size_t>(b)];
      for (std::int64_t h = 0; h < p_.heads_q; h += p_.group()) key_head(b, h, rows);
    }
    if (p_.quantization.counts) {
      result_[Slot::saturated].resize(1);
      result_[Slot::saturated].set(0, static_cast<double>(saturated_));
    }
  }

 private:
  using Row = std::vector<Real>;

  /// Quantises the heads of a group, which share one descale if the grain is a head.
  void key_head(std::int64_t b, std::int64_t first_head, const Rows& rows) {
    const std::int64_t group = p_.group();
    std::vector<std::vector<Row>> heads;
    for (std::int64_t h = first_head; h < first_head + group; ++h) {
      heads.push_back(load(h, rows));
      if (p_.quantization.smooth) take_mean(b, h, heads.back());
    }
    const std::int64_t length = rows.length;
    if (p_.quantization.grain == Grain::head) {
      Real largest = 0;
      for (const std::vector<Row>& head : heads) largest = std::max(largest, largest_of(head, 0, length));
      const Real descale = descale_of(b, first_head, rows, 0, largest);
      for (std::int64_t h = 0; h < group; ++h)
        put_rows(first_head + h, rows, heads[static_cast<std::size_t>(h)], 0, length, descale);
      return;
    }
    const std::int64_t step = p_.quantization.grain == Grain::token ? 1 : p_.quantization.block;
    for (std::int64_t h = 0; h < group; ++h) {
      const std::vector<Row>& head = heads[static_cast<std::size_t>(h)];
      for (std::int64_t i = 0; i < length; i += step) {
        const std::int64_t end = std::min(i + step, length);
        const Real descale = descale_of(b, first_head + h, rows, i, largest_of(head, i, end));
        put_rows(first_head + h, rows, head, i, end, descale);
      }
    }
  }

  [[nodiscard]] std::vector<Row> load(std::int64_t h, const Rows& rows) const {
    std::vector<Row> head;
    const Tensor& x = in_[Slot::x];
    for (std::int64_t i = 0; i < rows.length; ++i) {
      const std::int64_t at = token_offset(x, rows.first_token + i, h);
      Row row(static_cast<std::size_t>(p_.head_dim_qk));
      for (std::size_t c = 0; c < row.size(); ++c)
        row[c] = static_cast<Real>(read(x, at + static_cast<std::int64_t>(c)));
      head.push_back(p_.quantization.hadamard ? rotated(row) : row);
    }
    return head;
  }

  /// Multiplies elements by random signs, then blocks of the row by a Hadamard matrix. A block's size is the largest
  /// power of two that divides the row's length. Entry (i, j) is (−1)^(number of bits that i and j share) / √size.
  [[nodiscard]] Row rotated(const Row& row) const {
    const auto size = static_cast<std::size_t>(p_.head_dim_qk & -p_.head_dim_qk);
    Row out(row.size());
    for (const std::int64_t index : shuffled(static_cast<std::int64_t>(row.size()))) {
      const auto from = static_cast<std::size_t>(index);
      const std::uint32_t word = philox({static_cast<std::uint32_t>(from / 128), 0, 0, 0}, key_)[from / 32 % 4];
      const Real x = (word >> (from % 32) & 1U) != 0 ? -row[from] : row[from];
      for (std::size_t to = from / size * size; to < from / size * size + size; ++to) {
        const bool odd = __builtin_popcountll((to % size) & (from % size)) % 2 != 0;
        out[to] += odd ? -x : x;
      }
    }
    for (Real& x : out) x /= std::sqrt(static_cast<Real>(size));
    return out;
  }

  /// Subtracts the mean of the rows of a sequence. In the mean, numbers that are not finite count as 0.
  void take_mean(std::int64_t b, std::int64_t h, std::vector<Row>& head) {
    Row mean(static_cast<std::size_t>(p_.head_dim_qk));
    for (const std::int64_t i : shuffled(static_cast<std::int64_t>(head.size()))) {
      const Row& row = head[static_cast<std::size_t>(i)];
      for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += std::isfinite(row[c]) ? row[c] : 0;
    }
    for (std::size_t c = 0; c < mean.size(); ++c) {
      if (!head.empty()) mean[c] /= static_cast<Real>(head.size());
      const std::int64_t at = (b * p_.heads_q + h) * p_.head_dim_qk + static_cast<std::int64_t>(c);
      put_result<Real>(result_[Slot::x_mean], DType::fp32, at, static_cast<double>(mean[c]));
      for (Row& row : head) row[c] -= mean[c];
    }
  }

  [[nodiscard]] static Real largest_of(const std::vector<Row>& head, std::int64_t begin, std::int64_t end) {
    Real largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      for (const Real x : head[static_cast<std::size_t>(i)]) {
        if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
      }
    }
    return largest;
  }

  /// Returns the given descale, or computes it from the largest magnitude and writes it.
  Real descale_of(std::int64_t b, std::int64_t h, const Rows& rows, std::int64_t i, Real largest) {
    const Tensor& tensor = in_[Slot::x_descale];
    if (p_.quantization.given) {
      return static_cast<Real>(read(tensor, query_descale_offset(p_, tensor, b, h, i, rows.first_token + i)));
    }
    Real descale = 1;
    if (largest > 0) descale = std::max(largest / static_cast<Real>(range_.largest), static_cast<Real>(kLeastDescale));
    Tensor packed = Tensor::contiguous(nullptr, DType::fp32, tensor.shape.data(), tensor.rank);
    const std::int64_t index = query_descale_offset(p_, packed, b, h, i, rows.first_token + i);
    put_result<Real>(result_[Slot::x_descale], DType::fp32, index, static_cast<double>(descale));
    return descale;
  }

  void put_rows(std::int64_t h, const Rows& rows, const std::vector<Row>& head, std::int64_t begin, std::int64_t end,
                Real descale) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = ((rows.first_token + i) * p_.heads_q + h) * p_.head_dim_qk;
      for (std::int64_t c = 0; c < p_.head_dim_qk; ++c)
        put(at + c, head[static_cast<std::size_t>(i)][static_cast<std::size_t>(c)] / descale);
    }
  }

  /// NaN stays NaN if the type has it. In int8 it becomes 0 and counts as out of range.
  void put(std::int64_t index, Real scaled) {
    auto value = static_cast<double>(scaled);
    const bool nan = std::isnan(value);
    const bool integer = p_.o_type == DType::int8;
    if (nan ? integer : std::fabs(value) >= range_.end) ++saturated_;
    if (nan && integer) value = 0;
    if (!nan) value = std::clamp(value, -range_.largest, range_.largest);
    result_[Slot::x_quantized].set(index, value);
  }

  [[nodiscard]] std::vector<std::int64_t> shuffled(std::int64_t count) const {
    std::vector<std::int64_t> list(static_cast<std::size_t>(count));
    std::iota(list.begin(), list.end(), 0);
    if (order_ != 0) std::shuffle(list.begin(), list.end(), std::mt19937(order_));
    return list;
  }

  const Problem& p_;
  const Bindings& in_;
  Result& result_;
  std::uint32_t order_;
  Range range_;
  std::array<std::uint32_t, 2> key_{};
  std::int64_t saturated_ = 0;
};

}  // namespace

template <>
void compute_operation<Operation::quantize>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                            std::uint32_t order, Result& result) {
  if (arithmetic == Arithmetic::oracle) {
    Quantizer<double>(problem, bindings, result, order).run();
  } else {
    Quantizer<float>(problem, bindings, result, order).run();
  }
}

}  // namespace tessera::reference
