// SPDX-License-Identifier: Apache-2.0
// The operation `linear_decode`: linear attention with a decay for each head (Qin et al. 2024, Lightning Attention-2;
// Katharopoulos et al. 2020), a few tokens at a time, on states in a pool.
#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/linear/linear_ring.h"
#include "cpu/linear/linear_rows.h"
#include "cpu/linear/state_rounding.h"
#include "cpu/simd/kernels.h"
#include "operations/linear_steps.h"

namespace tessera::cpu {
namespace {

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  return has_kernels_of({problem.q_type, problem.k_type, problem.v_type});
}

void plan(detail::PlanState& state) { state.workspace_bytes = 0; }

/// Rows of one head of one sequence, padded with zeros. `inner` lies along the state's rows, `outer` across them.
struct Tokens {
  alignas(64) float inner[detail::kMostStepTokens][kLongestStateRow];  // k for the layout vk, v for kv
  alignas(64) float outer[detail::kMostStepTokens][kLongestStateRow];
  alignas(64) float q[detail::kMostStepTokens][kLongestStateRow];
  alignas(64) float o[detail::kMostStepTokens][kLongestStateRow];
};

class Head {
 public:
  Head(const Problem& problem, const Bindings& bindings, const Kernels& kernels, std::int64_t batch, std::int64_t head)
      : p_(problem), bindings_(bindings), kernels_(kernels), batch_(batch), head_(head) {
    const Tensor& slopes = bindings[Slot::decay_slopes];
    decay_ = std::exp(-slopes.as<float>()[head]);
    source_ = detail::slot_at(bindings[Slot::state_slots], batch, batch);
    target_ = detail::slot_at(bindings[Slot::dest_slots], batch, source_);
  }

  void run() const {
    Tokens tokens;
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) std::fill_n(tokens.o[t], padded(p_.head_dim_v), 0.0F);
    if (source_ >= 0) {
      load(tokens);
      if (p_.linear.state_layout == StateLayout::vk) {
        walk(p_.head_dim_v, p_.head_dim_qk, [&](std::int64_t row, float* s) { row_of_v(tokens, row, s); });
      } else {
        walk(p_.head_dim_qk, p_.head_dim_v, [&](std::int64_t row, float* s) { row_of_k(tokens, row, s); });
      }
    }
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      kernels_.store_row(p_.o_type, tokens.o[t], p_.head_dim_v, row_at(bindings_[Slot::o], batch_, t, head_));
    }
  }

 private:
  void load(Tokens& tokens) const {
    const bool vk = p_.linear.state_layout == StateLayout::vk;
    const auto rows = [&](Slot slot, std::int64_t dim, float scale, float(*to)[kLongestStateRow]) {
      const Tensor& tensor = bindings_[slot];
      for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
        kernels_.load_row(tensor.dtype, row_at(tensor, batch_, t, head_), dim, scale, to[t], padded(dim));
      }
    };
    rows(Slot::q, p_.head_dim_qk, p_.softmax_scale(), tokens.q);
    rows(Slot::k, p_.head_dim_qk, 1.0F, vk ? tokens.inner : tokens.outer);
    rows(Slot::v, p_.head_dim_v, 1.0F, vk ? tokens.outer : tokens.inner);
  }

  /// Calls update(row, its values in fp32) for each row of the state, and stores it. fp32 rows of whole vectors are
  /// updated in place if the target is the source.
  template <class Update>
  void walk(std::int64_t rows, std::int64_t columns, const Update& update) const {
    const Tensor& state = bindings_[Slot::state];
    const bool in_place = target_ == source_ && state.dtype == DType::fp32 && columns % kPad == 0;
    alignas(64) float buffer[kLongestStateRow];
    const StateRounding rounding(p_, bindings_, kernels_, target_, head_);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::byte* from = row_at(state, source_, head_, row);
      if (in_place) {
        update(row, reinterpret_cast<float*>(from));
        continue;
      }
      kernels_.load_row(state.dtype, from, columns, 1.0F, buffer, padded(columns));
      update(row, buffer);
      if (target_ >= 0) rounding.store(buffer, row, columns, row_at(state, target_, head_, row));
    }
  }

  void row_of_v(Tokens& tokens, std::int64_t row, float* s) const {
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      tokens.o[t][row] =
          kernels_.state_row_dot(padded(p_.head_dim_qk), decay_, tokens.outer[t][row], tokens.inner[t], tokens.q[t], s);
    }
  }

  void row_of_k(Tokens& tokens, std::int64_t row, float* s) const {
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      kernels_.state_row_add(padded(p_.head_dim_v), decay_, tokens.outer[t][row], tokens.inner[t], tokens.q[t][row], s,
                             tokens.o[t]);
    }
  }

  const Problem& p_;
  const Bindings& bindings_;
  const Kernels& kernels_;
  std::int64_t batch_;
  std::int64_t head_;
  float decay_ = 1.0F;
  std::int64_t source_ = 0;
  std::int64_t target_ = 0;
};

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Kernels& kernels = kernels_for(state.target.isa);
  resources.workers.parallel_for(problem.batch * problem.heads_q, [&](std::int64_t index) {
    const std::int64_t batch = index / problem.heads_q, head = index % problem.heads_q;
    if (problem.linear.ring > 0) {
      step_with_ring(problem, bindings, kernels, batch, head);
    } else {
      Head(problem, bindings, kernels, batch, head).run();
    }
  });
}

}  // namespace

const Implementation kLinearDecode = {{"cpu.linear_decode", DeviceType::cpu, Operation::linear_decode, supports, plan},
                                      run};

}  // namespace tessera::cpu
