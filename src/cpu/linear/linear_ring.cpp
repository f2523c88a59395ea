// SPDX-License-Identifier: Apache-2.0
// linear_decode with a ring: n tokens wait beside the state S, which does not include them. With a = exp(−slope),
//
//     o_t = a^(n+t+1) · q_t S + Σ_{i≤n+t} a^(n+t−i) · (q_t·k_i) v_i
//
// reads the state once and does not write it. If the ring has no room for the step's tokens, a flush comes first:
// S ← a^n · S + Σ_i a^(n−1−i) · k_i ⊗ v_i.
#include "cpu/linear/linear_ring.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/linear/linear_rows.h"
#include "cpu/linear/state_rounding.h"
#include "operations/linear_steps.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kMostTokens = detail::kLongestRing + detail::kMostStepTokens;

/// Rows of one head of one sequence in fp32, padded with zeros: the tokens that wait, then those of the step.
struct Tokens {
  alignas(64) float k[kMostTokens][kLongestStateRow];
  alignas(64) float v[kMostTokens][kLongestStateRow];
  alignas(64) float q[detail::kMostStepTokens][kLongestStateRow];
  alignas(64) float o[detail::kMostStepTokens][kLongestStateRow];
};

alignas(64) constexpr float kZeros[kLongestStateRow] = {};

class RingHead {
 public:
  RingHead(const Problem& problem, const Bindings& bindings, const Kernels& kernels, std::int64_t batch,
           std::int64_t head)
      : p_(problem), bindings_(bindings), kernels_(kernels), batch_(batch), head_(head) {
    slope_ = bindings[Slot::decay_slopes].as<float>()[head];
    slot_ = detail::slot_at(bindings[Slot::state_slots], batch, batch);
    const std::int64_t cursor = bindings[Slot::ring_cursor].as<std::int32_t>()[batch];
    waiting_ = cursor % (p_.linear.ring + 1);
    first_ = cursor > p_.linear.ring ? p_.linear.ring : 0;
    flush_ = p_.only_flushes() ? waiting_ > 0 : waiting_ + p_.seqlen_q > p_.linear.ring;
  }

  void run() const {
    Tokens tokens;
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) std::fill_n(tokens.o[t], padded(p_.head_dim_v), 0.0F);
    if (slot_ >= 0 && (flush_ || !p_.only_flushes())) {
      load(tokens);
      keep();
      if (p_.linear.state_layout == StateLayout::vk) {
        walk(p_.head_dim_v, p_.head_dim_qk, [&](std::int64_t row, float* s) { row_of_v(tokens, row, s); });
      } else {
        walk(p_.head_dim_qk, p_.head_dim_v, [&](std::int64_t row, float* s) { row_of_k(tokens, row, s); });
      }
      add_tokens(tokens);
    }
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      kernels_.store_row(p_.o_type, tokens.o[t], p_.head_dim_v, row_at(bindings_[Slot::o], batch_, t, head_));
    }
  }

 private:
  void load(Tokens& tokens) const {
    const auto rows = [&](Slot ring, Slot step, std::int64_t dim, float(*to)[kLongestStateRow]) {
      const Tensor& old = bindings_[ring];
      for (std::int64_t i = 0; i < waiting_; ++i) {
        kernels_.load_row(old.dtype, row_at(old, slot_, head_, first_ + i), dim, 1.0F, to[i], padded(dim));
      }
      const Tensor& fresh = bindings_[step];
      for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
        kernels_.load_row(fresh.dtype, row_at(fresh, batch_, t, head_), dim, 1.0F, to[waiting_ + t], padded(dim));
      }
    };
    rows(Slot::ring_k, Slot::k, p_.head_dim_qk, tokens.k);
    rows(Slot::ring_v, Slot::v, p_.head_dim_v, tokens.v);
    const Tensor& q = bindings_[Slot::q];
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      kernels_.load_row(q.dtype, row_at(q, batch_, t, head_), p_.head_dim_qk, p_.softmax_scale(), tokens.q[t],
                        padded(p_.head_dim_qk));
    }
  }

  /// Stores the step's tokens in the ring: behind those that wait, or, after a flush, in the other half.
  void keep() const {
    const std::int64_t next = flush_ ? p_.linear.ring - first_ : first_ + waiting_;
    const auto rows = [&](Slot from, Slot to, std::int64_t dim) {
      for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
        std::memcpy(row_at(bindings_[to], slot_, head_, next + t), row_at(bindings_[from], batch_, t, head_),
                    static_cast<std::size_t>(dim) * size_of(bindings_[to].dtype));
      }
    };
    rows(Slot::k, Slot::ring_k, p_.head_dim_qk);
    rows(Slot::v, Slot::ring_v, p_.head_dim_v);
  }

  /// Calls use(row, its values in fp32) for each row of the state, and stores it if there is a flush.
  template <class Use>
  void walk(std::int64_t rows, std::int64_t columns, const Use& use) const {
    const Tensor& state = bindings_[Slot::state];
    alignas(64) float buffer[kLongestStateRow];
    const StateRounding rounding(p_, bindings_, kernels_, slot_, head_);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::byte* at = row_at(state, slot_, head_, row);
      kernels_.load_row(state.dtype, at, columns, 1.0F, buffer, padded(columns));
      use(row, buffer);
      if (flush_) rounding.store(buffer, row, columns, at);
    }
  }

  void row_of_v(Tokens& tokens, std::int64_t row, float* s) const {
    const std::int64_t n = padded(p_.head_dim_qk);
    for (std::int64_t i = 0; flush_ && i < waiting_; ++i) {
      kernels_.state_row_dot(n, decay(1), tokens.v[i][row], tokens.k[i], kZeros, s);
    }
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) tokens.o[t][row] = decay_of_state(t) * dot(n, tokens.q[t], s);
  }

  void row_of_k(Tokens& tokens, std::int64_t row, float* s) const {
    const std::int64_t n = padded(p_.head_dim_v);
    alignas(64) float unused[kLongestStateRow] = {};
    for (std::int64_t i = 0; flush_ && i < waiting_; ++i) {
      kernels_.state_row_add(n, decay(1), tokens.k[i][row], tokens.v[i], 0.0F, s, unused);
    }
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) add(n, decay_of_state(t) * tokens.q[t][row], s, tokens.o[t]);
  }

  /// Adds to each output the waiting tokens that are not in the state yet, and the step's tokens up to its own.
  void add_tokens(Tokens& tokens) const {
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      for (std::int64_t i = flush_ ? waiting_ : 0; i <= waiting_ + t; ++i) {
        const float weight = dot(padded(p_.head_dim_qk), tokens.q[t], tokens.k[i]);
        add(padded(p_.head_dim_v), decay(waiting_ + t - i) * weight, tokens.v[i], tokens.o[t]);
      }
    }
  }

  /// exp(−slope · tokens); 1 for no tokens, even if the slope is infinite.
  [[nodiscard]] float decay(std::int64_t tokens) const {
    return tokens == 0 ? 1.0F
                       : static_cast<float>(std::exp(-static_cast<double>(slope_) * static_cast<double>(tokens)));
  }
  [[nodiscard]] float decay_of_state(std::int64_t t) const { return decay((flush_ ? 0 : waiting_) + t + 1); }

  /// Neither changes `s`.
  float dot(std::int64_t n, const float* y, float* s) const {
    return kernels_.state_row_dot(n, 1.0F, 0.0F, kZeros, y, s);
  }
  void add(std::int64_t n, float weight, float* s, float* sum) const {
    kernels_.state_row_add(n, 1.0F, 0.0F, kZeros, weight, s, sum);
  }

  const Problem& p_;
  const Bindings& bindings_;
  const Kernels& kernels_;
  std::int64_t batch_;
  std::int64_t head_;
  float slope_ = 0.0F;
  std::int64_t slot_ = 0;
  std::int64_t waiting_ = 0;
  std::int64_t first_ = 0;  // row of the ring
  bool flush_ = false;
};

}  // namespace

void step_with_ring(const Problem& problem, const Bindings& bindings, const Kernels& kernels, std::int64_t batch,
                    std::int64_t head) {
  RingHead(problem, bindings, kernels, batch, head).run();
}

}  // namespace tessera::cpu
