// SPDX-License-Identifier: Apache-2.0
// The operation `quantize`: converts rows to 8 bits with descales, after an optional rotation and without their mean.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "base/float8.h"
#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/scores/philox.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/sequence.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kLongestRow = 512;  // Problem::check's limit of the head dims
constexpr float kLeastDescale = 0x1p-126F;
using Row = std::array<float, kLongestRow>;

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& wishes) {
  if (wishes.tile_q || wishes.tile_kv || wishes.splits.value_or(1) != 1) {
    return Support::no("has no tiles and no splits");
  }
  return has_kernels_of({problem.q_type});
}

void plan(detail::PlanState& state) {
  state.workspace_bytes = 0;
  state.choice = "a key head of a sequence is a unit of work\n";
}

/// `end`: numbers of at least this magnitude are out of range; it is half a step above the largest number.
struct Format {
  float largest;
  float end;
};
Format format_of(DType dtype) {
  if (dtype == DType::e4m3) return {detail::kLargestE4m3, 464.0F};
  if (dtype == DType::e5m2) return {detail::kLargestE5m2, 61440.0F};
  return {127.0F, 127.5F};
}

/// Multiplies rows by random signs, then by blocks of a Hadamard matrix. The size of a block is the largest power of
/// two that divides the row's length.
class Rotation {
 public:
  Rotation(const Problem& problem, std::uint64_t seed)
      : dim_(problem.head_dim_qk), block_(problem.head_dim_qk & -problem.head_dim_qk) {
    if (!problem.quantization.hadamard) return;
    const float scale = 1.0F / std::sqrt(static_cast<float>(block_));
    for (std::int64_t c = 0; c < dim_; ++c) {
      const PhiloxCounter words =
          philox4x32({static_cast<std::uint32_t>(c / 128), 0, 0, 0},
                     {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
      const bool negative = (words[static_cast<std::size_t>(c / 32 % 4)] >> (c % 32) & 1U) != 0;
      signs_[static_cast<std::size_t>(c)] = negative ? -scale : scale;
    }
  }
  void apply(float* row) const {
    for (std::int64_t c = 0; c < dim_; ++c) row[c] *= signs_[static_cast<std::size_t>(c)];
    for (std::int64_t half = 1; half < block_; half *= 2) {
      for (std::int64_t first = 0; first < dim_; first += 2 * half) {
        for (std::int64_t c = first; c < first + half; ++c) {
          const float a = row[c];
          const float b = row[c + half];
          row[c] = a + b;
          row[c + half] = a - b;
        }
      }
    }
  }

 private:
  std::int64_t dim_, block_;
  Row signs_{};
};

/// What the units of a run share.
struct Run {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  Format format;
  Rotation rotation;
  std::atomic<std::int64_t> saturated{0};
};

/// A key head of a sequence.
class Unit {
 public:
  Unit(Run& run, std::int64_t batch, std::int64_t kv_head)
      : run_(run),
        p_(run.problem),
        sequence_(find_query_rows(run.problem, run.bindings, batch)),
        x_(rows_of(run.problem, run.bindings[Slot::x], sequence_)),
        out_(rows_of(run.problem, run.bindings[Slot::x_quantized], sequence_)),
        kv_head_(kv_head) {}

  void compute() {
    const std::int64_t first = kv_head_ * p_.group();
    if (p_.quantization.smooth) find_mean(first);
    if (p_.quantization.grain == Grain::head) {
      const std::int64_t end = first + p_.group();
      write(first, end, 0, sequence_.q_length, first);
    } else {
      const std::int64_t step = p_.quantization.grain == Grain::token ? 1 : p_.quantization.block;
      for (std::int64_t h = first; h < first + p_.group(); ++h) {
        for (std::int64_t i = 0; i < sequence_.q_length; i += step) {
          write(h, h + 1, i, std::min(i + step, sequence_.q_length), h);
        }
      }
    }
    run_.saturated += saturated_;
  }

 private:
  /// Loads a row as it is quantised, but not divided by its descale.
  void load(std::int64_t index, std::int64_t head) {
    run_.kernels.load_row(p_.q_type, x_.at(index, head), p_.head_dim_qk, 1.0F, row_.data(), padded(p_.head_dim_qk));
    if (p_.quantization.hadamard) run_.rotation.apply(row_.data());
    for (std::int64_t c = 0; has_mean_ && c < p_.head_dim_qk; ++c) row_[at(c)] -= mean_[at(c)];
  }

  /// Computes the mean of the rows; numbers that are not finite count as 0. With `smooth` a key head has one head.
  void find_mean(std::int64_t head) {
    std::array<double, kLongestRow> sum{};
    for (std::int64_t i = 0; i < sequence_.q_length; ++i) {
      load(i, head);
      for (std::int64_t c = 0; c < p_.head_dim_qk; ++c)
        sum[at(c)] += std::isfinite(row_[at(c)]) ? static_cast<double>(row_[at(c)]) : 0;
    }
    const Tensor& means = run_.bindings[Slot::x_mean];
    float* target = means.as<float>() + sequence_.batch * means.strides[0] + head * means.strides[1];
    const auto rows = static_cast<double>(std::max<std::int64_t>(sequence_.q_length, 1));
    for (std::int64_t c = 0; c < p_.head_dim_qk; ++c) target[c] = mean_[at(c)] = static_cast<float>(sum[at(c)] / rows);
    has_mean_ = true;
  }

  /// Quantises rows [begin, end) of some heads, which share one descale.
  void write(std::int64_t first_head, std::int64_t end_head, std::int64_t begin, std::int64_t end,
             std::int64_t descale_head) {
    float* descale = descale_at(begin, descale_head);
    if (!p_.quantization.given) {
      float largest = 0.0F;
      for (std::int64_t h = first_head; h < end_head; ++h) {
        for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, largest_of(i, h));
      }
      *descale = largest > 0.0F ? std::max(largest / run_.format.largest, kLeastDescale) : 1.0F;
    }
    for (std::int64_t h = first_head; h < end_head; ++h) {
      for (std::int64_t i = begin; i < end; ++i) {
        load(i, h);
        store(*descale, reinterpret_cast<std::uint8_t*>(out_.at(i, h)));
      }
    }
  }

  [[nodiscard]] float* descale_at(std::int64_t index, std::int64_t head) const {
    const Tensor& tensor = run_.bindings[Slot::x_descale];
    const Quantization& q = p_.quantization;
    float* base = tensor.as<float>();
    if (q.grain == Grain::head) return base + sequence_.batch * tensor.strides[0] + kv_head_ * tensor.strides[1];
    if (q.grain == Grain::token) return &scalars_of(p_, tensor, sequence_).at(index, head);
    return base + sequence_.batch * tensor.strides[0] + head * tensor.strides[1] + index / q.block * tensor.strides[2];
  }

  [[nodiscard]] float largest_of(std::int64_t index, std::int64_t head) {
    load(index, head);
    float largest = 0.0F;
    for (std::int64_t c = 0; c < p_.head_dim_qk; ++c) {
      const float magnitude = std::fabs(row_[at(c)]);
      if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
    }
    return largest;
  }

  void store(float descale, std::uint8_t* target) {
    for (std::int64_t c = 0; c < p_.head_dim_qk; ++c) target[c] = quantised(row_[at(c)] / descale);
  }

  /// NaN stays NaN if the type has it. In int8 it becomes 0 and counts as out of range.
  [[nodiscard]] std::uint8_t quantised(float value) {
    const bool integer = p_.o_type == DType::int8;
    if (std::isnan(value)) {
      if (integer) ++saturated_;
      value = integer ? 0.0F : value;
    } else {
      if (std::fabs(value) >= run_.format.end) ++saturated_;
      value = std::clamp(value, -run_.format.largest, run_.format.largest);
    }
    if (p_.o_type == DType::e4m3) return detail::to_e4m3(value);
    if (p_.o_type == DType::e5m2) return detail::to_e5m2(value);
    return static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(value)));
  }

  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

  Run& run_;
  const Problem& p_;
  Sequence sequence_;
  RowView x_, out_;
  std::int64_t kv_head_;
  bool has_mean_ = false;
  std::int64_t saturated_ = 0;
  Row row_;
  Row mean_;
};

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Tensor& seed = bindings[Slot::dropout_seed];
  Run shared{problem, bindings, kernels_for(state.target.isa), format_of(problem.o_type),
             Rotation(problem, seed ? *seed.as<std::uint64_t>() : bindings.seed)};
  resources.workers.parallel_for(problem.batch * problem.heads_kv, [&](std::int64_t index) {
    Unit(shared, index / problem.heads_kv, index % problem.heads_kv).compute();
  });
  if (problem.quantization.counts) *bindings[Slot::saturated].as<std::int64_t>() = shared.saturated;
}

}  // namespace

const Implementation kQuantize = {{"cpu.quantize", DeviceType::cpu, Operation::quantize, supports, plan}, run};

}  // namespace tessera::cpu
