// SPDX-License-Identifier: Apache-2.0
#include "cases/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/element.h"
#include "cases/compare_nsa.h"
#include "cases/compare_quantized.h"
#include "cases/compare_skip.h"
#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

constexpr double kResidualSteps = 254;  // of a spacing of O's type

bool is_integer(DType dtype) {
  return dtype == DType::int32 || dtype == DType::uint32 || dtype == DType::uint8 || dtype == DType::int64;
}

std::string place(const Tensor& tensor, std::int64_t index) {
  std::string text;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const std::int64_t size = tensor.shape[static_cast<std::size_t>(axis)];
    text = fmt::format("{}{}{}", index % size, text.empty() ? "" : ", ", text);
    index /= size;
  }
  return text;
}

struct Tolerance {
  double first_error;  // largest |plain − oracle| of the first run of plain
  double error;        // of all runs
  double spacing;      // of the dtype's numbers at the largest |oracle|

  [[nodiscard]] double allowed() const { return 2 * error + 2 * spacing; }
};

/// `values` picks the output of a result.
template <class Values>
Tolerance find_tolerance(const reference::Result& oracle, const std::vector<reference::Result>& plain, Values values,
                         const std::vector<std::uint8_t>* written, DType dtype) {
  Tolerance tolerance{};
  double largest = 0;
  const std::vector<double>& want = values(oracle);
  for (std::size_t i = 0; i < want.size(); ++i) {
    if ((written != nullptr && (*written)[i] == 0) || !std::isfinite(want[i])) continue;
    largest = std::max(largest, std::fabs(want[i]));
    for (const reference::Result& run : plain) {
      const double error = std::fabs(values(run)[i] - want[i]);
      if (!std::isfinite(error)) continue;
      tolerance.error = std::max(tolerance.error, error);
      if (&run == &plain.front()) tolerance.first_error = std::max(tolerance.first_error, error);
    }
  }
  tolerance.spacing = ulp(dtype, largest);
  return tolerance;
}

/// Whether `got` is what the dtype makes of a finite number too large for it.
bool overflowed(DType dtype, double got, double want, double allowed) {
  return std::isinf(got) && (got > 0) == (want > 0) && std::fabs(want) + allowed >= reference::format_of(dtype).largest;
}

/// Whether an intermediate result of the dtype overflowed in some run of plain, of which element `at` then is not
/// finite.
template <class Values>
bool overflows_in_plain(const std::vector<reference::Result>& plain, Values values, std::size_t at) {
  return std::any_of(plain.begin(), plain.end(),
                     [&](const reference::Result& run) { return !std::isfinite(values(run)[at]); });
}

/// O and its residual are one number, nearer to O before its rounding than half a step of the residual.
class WithResidual {
 public:
  explicit WithResidual(const Tensor& o) : dtype_(o.dtype) {
    if (!o) return;
    reference::for_each_element(
        o, [&](std::int64_t, std::int64_t offset) { rounded_.push_back(reference::read(o, offset)); });
  }
  [[nodiscard]] double at(std::int64_t index, double residual) const {
    return reference::with_residual(dtype_, rounded_[static_cast<std::size_t>(index)], residual);
  }

 private:
  DType dtype_;
  std::vector<double> rounded_;
};

void compare_numbers(Slot slot, const Bindings& bindings, const reference::Result& oracle_result,
                     const std::vector<reference::Result>& plain, Comparison& result) {
  const Tensor& tensor = bindings[slot];
  const reference::Output& oracle = oracle_result[slot];
  const auto values = [slot](const reference::Result& of) -> const std::vector<double>& { return of[slot].values; };
  const bool residual = slot == Slot::o_residual;
  const WithResidual sum(residual ? bindings[Slot::o] : Tensor{});
  const DType dtype = residual ? bindings[Slot::o].dtype : tensor.dtype;
  Tolerance tolerance = find_tolerance(oracle_result, plain, values, &oracle.written, dtype);
  if (residual) tolerance.spacing /= 2 * kResidualSteps;
  const double allowed = tolerance.allowed();
  double worst = 0;
  std::int64_t worst_index = -1;
  double worst_got = 0;
  reference::for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
    const auto at = static_cast<std::size_t>(index);
    if (oracle.written[at] == 0) return;
    const double read = reference::read(tensor, offset);
    const double got = residual ? sum.at(index, read) : read;
    const double want = oracle.values[at];
    double error = std::fabs(got - want);
    if (!std::isfinite(want) || !std::isfinite(got)) {
      const bool same =
          got == want || (std::isnan(got) && std::isnan(want)) ||
          (std::isfinite(want) && (overflowed(dtype, got, want, allowed) || overflows_in_plain(plain, values, at)));
      error = same ? 0 : std::numeric_limits<double>::infinity();
    }
    if (error > worst) {
      worst = error;
      worst_index = index;
      worst_got = got;
    }
  });
  if (worst_index >= 0) result.worst_ratio = std::max(result.worst_ratio, worst / allowed);
  result.mirrored &= tolerance.first_error <= 2 * worst + 2 * tolerance.spacing;
  if (worst <= allowed || !result.passed) return;
  result.passed = false;
  result.failure = fmt::format("{}: element ({}): got {:.9g}, oracle {:.9g}, error {:.3g} > tolerance {:.3g}",
                               tessera::to_string(slot), place(tensor, worst_index), worst_got,
                               oracle.values[static_cast<std::size_t>(worst_index)], worst, allowed);
}

/// Integers that have one right value.
std::string compare_integers(Slot slot, const Tensor& got, const reference::Output& oracle) {
  std::string failure;
  reference::for_each_element(got, [&](std::int64_t index, std::int64_t offset) {
    const auto at = static_cast<std::size_t>(index);
    const double value = reference::read(got, offset);
    if (oracle.written[at] == 0 || value == oracle.values[at] || !failure.empty()) return;
    failure = fmt::format("{}: element ({}): got {}, oracle {}", tessera::to_string(slot), place(got, index), value,
                          oracle.values[at]);
  });
  return failure;
}

/// Whether tile `block` of row `row` is in the list that the run wrote.
class NextList {
 public:
  NextList(const Problem& problem, const Bindings& got) : bits_(got[Slot::next_bits]) {
    const std::int64_t rows = problem.batch * problem.heads_q * problem.query_blocks();
    key_blocks_ = problem.key_blocks();
    kept_.assign(static_cast<std::size_t>(rows * key_blocks_), 0);
    for (std::int64_t row = 0; row < rows && failure_.empty(); ++row) {
      if (problem.next == TileList::Form::indices) {
        read_indices(got, row);
      } else {
        read_bits(row);
      }
    }
  }
  [[nodiscard]] const std::string& failure() const { return failure_; }
  [[nodiscard]] const std::vector<std::uint8_t>& kept() const { return kept_; }

 private:
  void read_indices(const Bindings& got, std::int64_t row) {
    const auto count = static_cast<std::int64_t>(reference::read(got[Slot::next_counts], row));
    if (count < 0 || count > key_blocks_) {
      failure_ = fmt::format("next_counts: row {}: got {}, want 0 to {}", row, count, key_blocks_);
      return;
    }
    std::int64_t previous = -1;
    for (std::int64_t entry = 0; entry < key_blocks_; ++entry) {
      const auto block = static_cast<std::int64_t>(reference::read(got[Slot::next_indices], row * key_blocks_ + entry));
      const bool good = entry < count ? block > previous && block < key_blocks_ : block == -1;
      if (!good) {
        failure_ =
            fmt::format("next_indices: row {} entry {} of {}: got {} after {}", row, entry, count, block, previous);
        return;
      }
      if (entry < count) kept_[static_cast<std::size_t>(row * key_blocks_ + block)] = 1;
      previous = block;
    }
  }
  void read_bits(std::int64_t row) {
    const std::int64_t words = (key_blocks_ + 31) / 32;
    for (std::int64_t block = 0; block < words * 32; ++block) {
      const auto word = static_cast<std::uint32_t>(reference::read(bits_, row * words + block / 32));
      if (((word >> (block % 32)) & 1U) == 0) continue;
      if (block >= key_blocks_) {
        failure_ = fmt::format("next_bits: row {}: bit {} of {} blocks is set", row, block, key_blocks_);
        return;
      }
      kept_[static_cast<std::size_t>(row * key_blocks_ + block)] = 1;
    }
  }

  const Tensor& bits_;
  std::int64_t key_blocks_ = 0;
  std::vector<std::uint8_t> kept_;
  std::string failure_;
};

void compare_next(const Problem& problem, const Bindings& got, const reference::Result& oracle,
                  const std::vector<reference::Result>& plain, Comparison& result) {
  const NextList next(problem, got);
  std::string failure = next.failure();
  const auto masses = [](const reference::Result& of) -> const std::vector<double>& { return of.next_mass; };
  const double allowed = find_tolerance(oracle, plain, masses, nullptr, DType::fp32).allowed();
  const auto threshold = static_cast<double>(problem.next_threshold);
  for (std::size_t tile = 0; tile < next.kept().size() && failure.empty(); ++tile) {
    const double mass = oracle.next_mass[tile];
    const bool want = mass > threshold;
    if (want == (next.kept()[tile] != 0) || std::fabs(mass - threshold) <= allowed) continue;
    failure = fmt::format("next list: tile {} of mass {:.9g}: {}, threshold {}", tile, mass, want ? "left out" : "kept",
                          threshold);
  }
  if (failure.empty() || !result.passed) return;
  result.passed = false;
  result.failure = failure;
}

}  // namespace

double ulp(DType dtype, double magnitude) noexcept {
  const reference::Format format = reference::format_of(dtype);
  const int least = format.least_exponent();
  const int exponent = magnitude > 0 ? std::ilogb(magnitude) : least;
  return std::ldexp(1.0, std::max(exponent, least) - format.digits);
}

reference::Arithmetic plain_arithmetic(const Plan& plan) {
  const bool of_bytes = plan.problem().operation == Operation::attention && plan.problem().q_type == DType::e4m3 &&
                        plan.implementation() == "cuda.fwd_wgmma";
  return of_bytes ? reference::Arithmetic::byte_products : reference::Arithmetic::plain;
}

bool rounding_may_explain(double ratio, std::size_t runs) noexcept {
  constexpr double kHopeless = 1000;
  // The first run tells nothing of finite results where it is not finite itself.
  return runs < kPlainRuns && (runs == 1 || ratio < kHopeless);
}

Comparison compare(const Problem& problem, const Bindings& got, const reference::Result& oracle,
                   const std::vector<reference::Result>& plain) {
  Comparison result;
  for (std::size_t index = 0; index < oracle.outputs.size(); ++index) {
    const auto slot = static_cast<Slot>(index);
    if (oracle[slot].values.empty() || is_integer(got[slot].dtype) || slot == Slot::x_quantized) continue;
    if (detail::is_quantised(got[slot].dtype) && slot != Slot::o_residual) {  // rows of a cache, copied
      if (result.passed) result.failure = compare_integers(slot, got[slot], oracle[slot]);
      result.passed &= result.failure.empty();
      continue;
    }
    compare_numbers(slot, got, oracle, plain, result);
  }
  if (!oracle[Slot::cu_blocks].values.empty() && result.passed) {
    result.failure = compare_integers(Slot::cu_blocks, got[Slot::cu_blocks], oracle[Slot::cu_blocks]);
    result.passed = result.failure.empty();
  }
  if (problem.next != TileList::Form::none) compare_next(problem, got, oracle, plain, result);
  const auto masses = [](const reference::Result& of) -> const std::vector<double>& { return of.next_mass; };
  const auto allowed = [&] { return find_tolerance(oracle, plain, masses, nullptr, DType::fp32).allowed(); };
  if (problem.skip && result.passed) result.failure = compare_skip(problem, got, oracle, allowed());
  if (problem.operation == Operation::nsa_select) result.failure = compare_selected(got, oracle, allowed());
  if (problem.nsa.compressed_top > 0 && result.failure.empty()) {
    const auto scores = [](const reference::Result& of) -> const std::vector<double>& { return of.compressed_scores; };
    result.failure =
        compare_compressed(got, oracle, find_tolerance(oracle, plain, scores, nullptr, DType::fp32).allowed());
  }
  if (problem.operation == Operation::quantize && result.passed) {
    const auto scaled = [](const reference::Result& of) -> const std::vector<double>& {
      return of[Slot::x_quantized].values;
    };
    const auto& written = oracle[Slot::x_quantized].written;
    result.failure =
        compare_quantized(got, oracle, find_tolerance(oracle, plain, scaled, &written, DType::fp32).allowed());
    if (result.failure.empty() && problem.quantization.counts) {
      result.failure = compare_integers(Slot::saturated, got[Slot::saturated], oracle[Slot::saturated]);
    }
  }
  result.passed &= result.failure.empty();
  return result;
}

}  // namespace tessera::cases
