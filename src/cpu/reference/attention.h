// SPDX-License-Identifier: Apache-2.0
// The oracle's attention, forward and backward, one query row at a time over the keys that the row sees.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/reference/number.h"
#include "cpu/reference/reference.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {

/// Real: double for the oracle, float for the plain implementation.
template <class Real>
class Attention {
 public:
  /// `of_bytes`: Arithmetic::byte_products.
  Attention(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order,
            bool of_bytes = false);
  void run();

 private:
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  struct Row {
    std::int64_t batch, head, index;  // index in its sequence
    std::int64_t position;
    std::int64_t token;
  };

  void size_outputs();
  void load_keys(std::int64_t batch, std::int64_t head_kv);
  void load_row(const Tensor& tensor, const Row& row, std::vector<Real>& to) const;
  void shuffle(std::vector<std::int64_t>& order);
  [[nodiscard]] std::vector<std::int64_t> shuffled(std::int64_t count);
  /// Only for problems with chunks.
  [[nodiscard]] std::int64_t chunk_of(std::int64_t position) const;
  void find_visible(const Row& row);
  void score_row(const Row& row);
  void multiply_byte_keys(Real descale);
  void weigh_byte_values(const Row& row, Real normalise_at, Real denominator);
  [[nodiscard]] Real score(const Row& row, std::int64_t key, Real dot, Real& slope) const;
  [[nodiscard]] bool kept(const Row& row, std::int64_t key) const;
  void forward_row(const Row& row);
  void add_mass(const Row& row, Real lse);
  void finish_mass(std::int64_t batch, std::int64_t head);
  void write_next(std::int64_t batch, std::int64_t head);
  void skip_row(const Row& row, Real lse);
  void finish_skip(std::int64_t batch, std::int64_t head);
  void backward_row(const Row& row);
  void add_residual(const Row& row);
  void write_key_gradients(std::int64_t batch, std::int64_t head_kv);
  void write_padding(std::int64_t batch, std::int64_t head);
  void add_gradient(Slot slot, std::int64_t index, std::int64_t offset, Real gradient);

  [[nodiscard]] Real round(Real value) const noexcept {
    if constexpr (std::is_same_v<Real, double>) return value;
    if (step_ == DType::fp32) return value;
    const Real scaled = value * rounding_scale_;
    Real rounded = round_to(step_, scaled);
    // Run 0 shows what exceeds fp16's range; the other runs show the rounding error of such numbers.
    if (order_ > 0 && std::isinf(rounded)) rounded = round_to(step_, scaled * 0x1p-32F) * 0x1p32F;
    return rounded / rounding_scale_;
  }
  [[nodiscard]] static Real round_as(DType dtype, Real value) noexcept {
    if constexpr (std::is_same_v<Real, double>) return value;
    return round_to(dtype, value);
  }
  /// Replaces subnormal numbers of fp32 by 0, as the exponentials of GPUs and vector units do.
  [[nodiscard]] static Real flush(Real value) noexcept {
    if constexpr (std::is_same_v<Real, double>) return value;
    return value < std::numeric_limits<Real>::min() ? Real{0} : value;
  }
  /// e^(x − shift).
  [[nodiscard]] Real exponential(Real x, Real shift) const noexcept {
    constexpr auto kLog2e = static_cast<Real>(1.4426950408889634);
    return flush(other_form_ ? std::exp2(x * kLog2e - shift * kLog2e) : std::exp(x - shift));
  }
  void put(Slot slot, std::int64_t index, double value) { result_[slot].set(index, value); }

  const Problem& problem_;
  const Bindings& in_;
  Result& result_;
  Sequences sequences_;
  TileStates tiles_;
  ScoreFunction score_;
  MaskFunction mask_;
  DType step_;           // narrowest of q, k, v
  Real rounding_scale_;  // in (1/2, 1], different in each run, so that rounding errors are drawn anew
  std::uint32_t order_;
  bool other_form_;  // other forms of the same formulas: q scaled before the products, exponentials to base 2, …
  bool of_bytes_;
  Real k_factor_ = 1, v_factor_ = 1;  // of_bytes_: descales of the keys being computed
  std::uint32_t shuffles_ = 0;
  std::int64_t d_, dv_;
  std::vector<std::int64_t> dims_, value_dims_;  // orders of summation over d and dv
  std::uint32_t threshold_;
  std::uint64_t seed_, philox_offset_;
  bool weighs_;  // mass or a next list is wanted

  // The keys of the (batch, kv head) being computed: n of all segments, one after another.
  struct Key {
    std::int64_t position, block;
    std::size_t segment;
    std::int64_t index;  // in the segment
  };
  std::vector<Key> keys_;                                         // (n)
  std::vector<Real> k_, k_by_dim_, v_, v_by_dim_, dk_, dv_grad_;  // (n, d), (d, n), (n, dv), (dv, n), (n, d), (n, dv)
  // The query row being computed.
  std::vector<Real> q_, o_, dout_, dq_;
  std::vector<std::int64_t> visible_;       // indices into keys_, in the order of summation
  std::size_t first_ = 0, last_ = 0;        // range of them, end exclusive
  std::vector<Real> scores_, slopes_, dp_;  // (n); slope: d score / d (q·k)
  std::vector<Real> mass_;                  // (b, hq, query blocks, key blocks)
  std::vector<Real> row_mass_;              // (key blocks)
  std::vector<std::uint8_t> unknown_;       // skip states: (b, hq, query blocks): whether a row's masses are unknown
};

extern template class Attention<double>;
extern template class Attention<float>;

}  // namespace tessera::reference
