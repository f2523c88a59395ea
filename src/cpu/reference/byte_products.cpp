// SPDX-License-Identifier: Apache-2.0
// Arithmetic::byte_products: the rounding of an implementation that multiplies e4m3 on tensor cores of SM90.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/reference/attention.h"

namespace tessera::reference {
namespace {

constexpr std::size_t kDepth = 32;           // summands that are added to a sum at once
constexpr std::size_t kPromotedKeys = 4096;  // after so many keys the sum is added to one of fp32, up to 128 columns
constexpr int kKeptDigits = 13;              // bits kept of each summand, behind the leading bit of the largest
// The largest P of a row is between 2^4 and 2^8: origins follow maxima with a slack.
constexpr double kOffset = 4;
constexpr double kSlack = 4;

/// Adds summands to a sum as tensor cores do: all are truncated to the bits that are kept of the largest, and the
/// result to its own leading bits.
template <class Real>
Real add_cut(Real sum, const Real* summands, std::size_t count) {
  Real largest = std::fabs(sum);
  bool finite = std::isfinite(sum);
  for (std::size_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(summands[i]));
    finite = finite && std::isfinite(summands[i]);
  }
  if (!finite) {
    for (std::size_t i = 0; i < count; ++i) sum += summands[i];
    return sum;
  }
  if (largest == 0) return sum;
  const Real unit = std::ldexp(Real{1}, std::ilogb(largest) - kKeptDigits);
  if (!(unit > 0) || !std::isfinite(1 / unit)) return sum;  // below the numbers of fp32
  Real units = std::trunc(sum / unit);
  for (std::size_t i = 0; i < count; ++i) units += std::trunc(summands[i] / unit);
  if (units == 0) return units;
  const Real kept = std::ldexp(Real{1}, std::max(std::ilogb(units) - kKeptDigits, 0));
  return std::trunc(units / kept) * kept * unit;
}

}  // namespace

/// Computes the products of q_ with the visible keys, times both descales.
template <class Real>
void Attention<Real>::multiply_byte_keys(Real descale) {
  const Real factor = other_form_ ? descale * static_cast<Real>(problem_.softmax_scale()) : descale;
  for (const std::int64_t j : visible_) {
    Real sum = 0;
    Real products[kDepth];
    for (std::size_t first = 0; first < dims_.size(); first += kDepth) {
      const std::size_t count = std::min(kDepth, dims_.size() - first);
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t c = dims_[first + i];
        products[i] = q_[static_cast<std::size_t>(c)] * k_[static_cast<std::size_t>(j * d_ + c)];
      }
      sum = add_cut(sum, products, count);
    }
    scores_[static_cast<std::size_t>(j)] = sum * factor;
  }
}

/// Computes o_ from the scores with P rounded to e4m3. `denominator` is the sum of P before rounding.
template <class Real>
void Attention<Real>::weigh_byte_values(const Row& row, Real normalise_at, Real denominator) {
  const auto factor = static_cast<Real>(std::exp2(kOffset + kSlack * std::fmod(order_ * 0.6180339887498949, 1.0)));
  Real largest = -kInfinity;
  for (const std::int64_t j : visible_) largest = std::max(largest, scores_[static_cast<std::size_t>(j)]);
  std::vector<Real> weights;
  std::vector<std::int64_t> keys;
  for (const std::int64_t j : visible_) {
    if (problem_.dropout > 0 && !kept(row, j)) continue;
    const Real p = exponential(scores_[static_cast<std::size_t>(j)], largest) * factor;
    weights.push_back(std::isfinite(p) ? static_cast<Real>(nearest_quantised(DType::e4m3, static_cast<double>(p))) : p);
    keys.push_back(j);
  }
  Real divisor = denominator * factor * std::exp(normalise_at - largest);
  if (problem_.dropout > 0) divisor *= static_cast<Real>(threshold_) / Real{65536};
  for (std::size_t c = 0; c < o_.size(); ++c) {
    Real total = 0;
    Real sum = 0;
    Real products[kDepth];
    for (std::size_t first = 0; first < keys.size(); first += kDepth) {
      if (dv_ <= 128 && first % kPromotedKeys == 0) total += std::exchange(sum, Real{0});
      const std::size_t count = std::min(kDepth, keys.size() - first);
      for (std::size_t i = 0; i < count; ++i) {
        products[i] = weights[first + i] * v_by_dim_[c * keys_.size() + static_cast<std::size_t>(keys[first + i])];
      }
      sum = add_cut(sum, products, count);
    }
    o_[c] = (total + sum) * v_factor_ / divisor;
  }
}

template void Attention<double>::multiply_byte_keys(double);
template void Attention<float>::multiply_byte_keys(float);
template void Attention<double>::weigh_byte_values(const Row&, double, double);
template void Attention<float>::weigh_byte_values(const Row&, float, float);

}  // namespace tessera::reference
