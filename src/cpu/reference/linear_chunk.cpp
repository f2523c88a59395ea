// SPDX-License-Identifier: Apache-2.0
// The oracle's linear_chunk: whole sequences token by token, and the gradient by the recurrence run backwards.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cpu/reference/linear.h"
#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

template <class Real>
class Chunked {
 public:
  Chunked(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order)
      : p_(problem), bindings_(bindings), result_(result), scales_q_(order % 2 == 0) {
    summands_ = shuffled(p_.head_dim_qk, order);
    columns_ = shuffled(p_.head_dim_v, order);
  }

  void run() {
    const Sequences sequences = resolve_sequences(p_, bindings_);
    for (batch_ = 0; batch_ < p_.batch; ++batch_) {
      rows_ = sequences.query[static_cast<std::size_t>(batch_)];
      for (head_ = 0; head_ < p_.heads_q; ++head_) {
        decay_ = std::exp(static_cast<Real>(-read(bindings_[Slot::decay_slopes], head_)));
        if (p_.pass == Pass::forward) {
          forward();
        } else {
          backward();
        }
      }
    }
  }

 private:
  using Column = std::vector<Real>;  // of the state: all k of one v

  static std::vector<std::int64_t> shuffled(std::int64_t count, std::uint32_t order) {
    std::vector<std::int64_t> list(static_cast<std::size_t>(count));
    std::iota(list.begin(), list.end(), 0);
    if (order != 0) std::shuffle(list.begin(), list.end(), std::mt19937(order));
    return list;
  }

  void forward() {
    const std::int64_t target = slot(Slot::dest_slots, slot(Slot::state_slots, batch_));
    for (std::int64_t v = 0; v < p_.head_dim_v; ++v) {
      Column s = first_state(v);
      for (std::int64_t t = 0; t < rows_.length; ++t) {
        update(s, t, v);
        Real sum = 0;
        for (const std::int64_t k : summands_) sum += query(t, k) * s[static_cast<std::size_t>(k)];
        put(Slot::o, row_index(t, p_.head_dim_v) + v, static_cast<double>(unscaled(sum)));
      }
      if (p_.linear.states == 0 || target < 0) continue;
      for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
        put(Slot::state, state_element(p_, target, head_, v, k), static_cast<double>(s[static_cast<std::size_t>(k)]));
      }
    }
  }

  /// With G_t = dL/dS_t = scale·q_t ⊗ dO_t + decay·G_{t+1}: dQ_t = scale·S_t dO_t, dK_t = G_t v_t, dV_t = G_tᵀ k_t.
  void backward() {
    const auto size = static_cast<std::size_t>(rows_.length * p_.head_dim_qk);
    dq_.assign(size, 0);
    dk_.assign(size, 0);
    dv_.assign(static_cast<std::size_t>(rows_.length * p_.head_dim_v), 0);
    for (const std::int64_t v : columns_) {
      Column s = first_state(v);
      for (std::int64_t t = 0; t < rows_.length; ++t) {
        update(s, t, v);
        const Real gradient = number(Slot::dout, t, v);
        for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) at(dq_, t, k) += gradient * s[static_cast<std::size_t>(k)];
      }
      const Column first = walk_back(v);
      for (std::int64_t k = 0; bindings_[Slot::dstate_initial] && k < p_.head_dim_qk; ++k) {
        put(Slot::dstate_initial, state_element(p_, batch_, head_, v, k),
            static_cast<double>(first[static_cast<std::size_t>(k)]));
      }
    }
    for (std::int64_t t = 0; t < rows_.length; ++t) {
      for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
        const std::int64_t index = row_index(t, p_.head_dim_qk) + k;
        put(Slot::dq, index, static_cast<double>(static_cast<Real>(p_.softmax_scale()) * at(dq_, t, k)));
        put(Slot::dk, index, static_cast<double>(at(dk_, t, k)));
      }
      for (std::int64_t v = 0; v < p_.head_dim_v; ++v) {
        put(Slot::dv, row_index(t, p_.head_dim_v) + v,
            static_cast<double>(dv_[static_cast<std::size_t>(t * p_.head_dim_v + v)]));
      }
    }
  }

  /// Computes one column of G from the last token to the first. Adds its part to dk and dv, and returns the gradient of
  /// the first state.
  Column walk_back(std::int64_t v) {
    const auto scale = static_cast<Real>(p_.softmax_scale());
    Column g = gradient_of_last_state(v);
    for (std::int64_t t = rows_.length - 1; t >= 0; --t) {
      const Real gradient = scale * number(Slot::dout, t, v);
      const Real value = number(Slot::v, t, v);
      Real sum = 0;
      for (const std::int64_t k : summands_) {
        Real& element = g[static_cast<std::size_t>(k)];
        element += number(Slot::q, t, k) * gradient;
        at(dk_, t, k) += element * value;
        sum += element * number(Slot::k, t, k);
      }
      dv_[static_cast<std::size_t>(t * p_.head_dim_v + v)] = sum;
      for (Real& element : g) element *= decay_;
    }
    return g;
  }

  void update(Column& s, std::int64_t t, std::int64_t v) const {
    const Real value = number(Slot::v, t, v);
    for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
      Real& element = s[static_cast<std::size_t>(k)];
      element = decay_ * element;
      element += number(Slot::k, t, k) * value;
    }
  }

  /// The output is Σ (scale·q)·s, or scale·Σ q·s.
  [[nodiscard]] Real query(std::int64_t t, std::int64_t k) const {
    const Real q = number(Slot::q, t, k);
    return scales_q_ ? static_cast<Real>(p_.softmax_scale()) * q : q;
  }
  [[nodiscard]] Real unscaled(Real sum) const { return scales_q_ ? sum : static_cast<Real>(p_.softmax_scale()) * sum; }

  [[nodiscard]] std::int64_t slot(Slot of, std::int64_t otherwise) const {
    return bindings_[of] ? static_cast<std::int64_t>(read(bindings_[of], batch_)) : otherwise;
  }
  [[nodiscard]] Real number(Slot of, std::int64_t t, std::int64_t column) const {
    const Tensor& tensor = bindings_[of];
    return static_cast<Real>(read(tensor, token_offset(tensor, rows_.first_token + t, head_) + column));
  }
  [[nodiscard]] std::int64_t row_index(std::int64_t t, std::int64_t dim) const {
    return ((rows_.first_token + t) * p_.heads_q + head_) * dim;
  }
  Real& at(std::vector<Real>& rows, std::int64_t t, std::int64_t k) const {
    return rows[static_cast<std::size_t>(t * p_.head_dim_qk + k)];
  }

  [[nodiscard]] Column first_state(std::int64_t v) const {
    const std::int64_t source = slot(Slot::state_slots, batch_);
    if (p_.linear.states == 0 || source < 0) return Column(static_cast<std::size_t>(p_.head_dim_qk));
    return column_of(Slot::state, source, v);
  }
  [[nodiscard]] Column gradient_of_last_state(std::int64_t v) const {
    if (!bindings_[Slot::dstate_final]) return Column(static_cast<std::size_t>(p_.head_dim_qk));
    return column_of(Slot::dstate_final, batch_, v);
  }
  [[nodiscard]] Column column_of(Slot of, std::int64_t outer, std::int64_t v) const {
    const Tensor& tensor = bindings_[of];
    const bool vk = p_.linear.state_layout == StateLayout::vk;
    Column column(static_cast<std::size_t>(p_.head_dim_qk));
    for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
      const std::int64_t at = outer * tensor.strides[0] + head_ * tensor.strides[1] + (vk ? v : k) * tensor.strides[2];
      column[static_cast<std::size_t>(k)] = static_cast<Real>(read(tensor, at + (vk ? k : v)));
    }
    return column;
  }
  void put(Slot to, std::int64_t index, double value) {
    put_result<Real>(result_[to], bindings_[to].dtype, index, value);
  }

  const Problem& p_;
  const Bindings& bindings_;
  Result& result_;
  bool scales_q_;
  std::vector<std::int64_t> summands_, columns_;  // of k and of v, in the order in which they are added
  std::int64_t batch_ = 0, head_ = 0;
  Real decay_ = 1;
  Rows rows_;
  std::vector<Real> dq_, dk_, dv_;  // of one head of one sequence
};

}  // namespace

template <>
void compute_operation<Operation::linear_chunk>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                                std::uint32_t order, Result& result) {
  const std::int64_t tokens = problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
  const std::int64_t state = problem.heads_q * problem.head_dim_qk * problem.head_dim_v;
  const auto size = [&result, &bindings](Slot slot, std::int64_t count) {
    if (bindings[slot]) result[slot].resize(count);
  };
  if (problem.pass == Pass::forward) {
    size(Slot::o, tokens * problem.heads_q * problem.head_dim_v);
    size(Slot::state, problem.linear.states * state);
  } else {
    size(Slot::dq, tokens * problem.heads_q * problem.head_dim_qk);
    size(Slot::dk, tokens * problem.heads_q * problem.head_dim_qk);
    size(Slot::dv, tokens * problem.heads_q * problem.head_dim_v);
    size(Slot::dstate_initial, problem.batch * state);
  }
  if (arithmetic == Arithmetic::oracle) {
    Chunked<double>(problem, bindings, result, order).run();
  } else {
    Chunked<float>(problem, bindings, result, order).run();
  }
}

}  // namespace tessera::reference
