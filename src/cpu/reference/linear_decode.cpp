// SPDX-License-Identifier: Apache-2.0
// The oracle's linear_decode: the recurrence, one element of the state after another.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cpu/reference/linear.h"
#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"

namespace tessera::reference {
namespace {

std::int64_t offset_of(const Tensor& tensor, std::int64_t i0, std::int64_t i1, std::int64_t i2) {
  return i0 * tensor.strides[0] + i1 * tensor.strides[1] + i2 * tensor.strides[2];
}

/// One head of one sequence in the arithmetic Real.
template <class Real>
class Recurrence {
 public:
  Recurrence(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order)
      : p_(problem), bindings_(bindings), result_(result), scales_q_(order % 2 == 0) {
    summands_.resize(static_cast<std::size_t>(p_.head_dim_qk));
    std::iota(summands_.begin(), summands_.end(), 0);
    if (order != 0) std::shuffle(summands_.begin(), summands_.end(), std::mt19937(order));
  }

  /// Tokens that wait in the ring are added to the state first, as if their steps were now.
  void run(std::int64_t b, std::int64_t h) {
    const std::int64_t source = slot(Slot::state_slots, b, b);
    const std::int64_t target = slot(Slot::dest_slots, b, source);
    if (source < 0) {
      for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
        for (std::int64_t v = 0; v < p_.head_dim_v; ++v) put_o(b, t, h, v, 0.0);
      }
      return;
    }
    const auto decay = std::exp(static_cast<Real>(-read(bindings_[Slot::decay_slopes], h)));
    const Waiting waiting = waiting_of(b);
    if (p_.linear.ring > 0) put_into_ring(b, h, source, waiting);
    for (std::int64_t v = 0; v < p_.head_dim_v; ++v) {
      std::vector<Real> s = load_state(source, h, v);
      for (std::int64_t i = 0; i < waiting.tokens; ++i) {
        const std::int64_t row = waiting.first + i;
        take_in(s, decay, Slot::ring_k, offset_of(bindings_[Slot::ring_k], source, h, row),
                number(Slot::ring_v, source, h, row, v));
      }
      if (p_.linear.ring > 0 && waiting.flush) put_state(s, source, h, v);
      for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
        take_in(s, decay, Slot::k, offset_of(bindings_[Slot::k], b, t, h), number(Slot::v, b, t, h, v));
        put_o(b, t, h, v, static_cast<double>(product(s, b, t, h)));
      }
      if (p_.linear.ring == 0 && target >= 0) put_state(s, target, h, v);
    }
  }

 private:
  /// What a sequence's ring holds.
  struct Waiting {
    std::int64_t first = 0, tokens = 0;  // rows of the ring
    bool flush = false;                  // they go into the state now
    std::int64_t next = 0;               // row of the step's first token
  };
  [[nodiscard]] Waiting waiting_of(std::int64_t b) const {
    if (p_.linear.ring == 0) return {};
    const auto cursor = static_cast<std::int64_t>(read(bindings_[Slot::ring_cursor], b));
    Waiting waiting;
    waiting.first = cursor / (p_.linear.ring + 1) * p_.linear.ring;
    waiting.tokens = cursor % (p_.linear.ring + 1);
    waiting.flush = p_.seqlen_q == 0 ? waiting.tokens > 0 : waiting.tokens + p_.seqlen_q > p_.linear.ring;
    waiting.next = waiting.flush ? p_.linear.ring - waiting.first : waiting.first + waiting.tokens;
    return waiting;
  }
  void put_into_ring(std::int64_t b, std::int64_t h, std::int64_t slot, const Waiting& waiting) {
    const auto row = [&](Slot from, Slot to, std::int64_t t, std::int64_t dim) {
      const std::int64_t index = ((slot * p_.heads_q + h) * 2 * p_.linear.ring + waiting.next + t) * dim;
      for (std::int64_t c = 0; c < dim; ++c) put(to, index + c, static_cast<double>(number(from, b, t, h, c)));
    };
    for (std::int64_t t = 0; t < p_.seqlen_q; ++t) {
      row(Slot::k, Slot::ring_k, t, p_.head_dim_qk);
      row(Slot::v, Slot::ring_v, t, p_.head_dim_v);
    }
  }

  /// s ← decay · s + k · value for one value of V; k from `offset` on in `keys`.
  void take_in(std::vector<Real>& s, Real decay, Slot keys, std::int64_t offset, Real value) const {
    for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
      Real& element = s[static_cast<std::size_t>(k)];
      element = decay * element;
      element += static_cast<Real>(read(bindings_[keys], offset + k)) * value;
    }
  }
  void put_state(const std::vector<Real>& s, std::int64_t slot, std::int64_t h, std::int64_t v) {
    for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
      put(Slot::state, state_element(p_, slot, h, v, k), static_cast<double>(s[static_cast<std::size_t>(k)]));
    }
  }

  /// Returns Σ (scale·q)·s, or scale·Σ q·s.
  Real product(const std::vector<Real>& s, std::int64_t b, std::int64_t t, std::int64_t h) const {
    const auto scale = static_cast<Real>(p_.softmax_scale());
    Real sum = 0;
    for (const std::int64_t k : summands_) {
      const Real q = number(Slot::q, b, t, h, k);
      sum += (scales_q_ ? scale * q : q) * s[static_cast<std::size_t>(k)];
    }
    return scales_q_ ? sum : scale * sum;
  }

  [[nodiscard]] std::int64_t slot(Slot of, std::int64_t b, std::int64_t otherwise) const {
    return bindings_[of] ? static_cast<std::int64_t>(read(bindings_[of], b)) : otherwise;
  }
  [[nodiscard]] Real number(Slot of, std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t column) const {
    return static_cast<Real>(read(bindings_[of], offset_of(bindings_[of], b, t, h) + column));
  }
  [[nodiscard]] std::vector<Real> load_state(std::int64_t slot, std::int64_t h, std::int64_t v) const {
    const Tensor& state = bindings_[Slot::state];
    const bool vk = p_.linear.state_layout == StateLayout::vk;
    std::vector<Real> s(static_cast<std::size_t>(p_.head_dim_qk));
    for (std::int64_t k = 0; k < p_.head_dim_qk; ++k) {
      const std::int64_t at = vk ? offset_of(state, slot, h, v) + k : offset_of(state, slot, h, k) + v;
      s[static_cast<std::size_t>(k)] = static_cast<Real>(read(state, at));
    }
    return s;
  }
  void put_o(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t v, double value) {
    put(Slot::o, ((b * p_.seqlen_q + t) * p_.heads_q + h) * p_.head_dim_v + v, value);
  }
  void put(Slot to, std::int64_t index, double value) {
    put_result<Real>(result_[to], bindings_[to].dtype, index, value);
  }

  const Problem& p_;
  const Bindings& bindings_;
  Result& result_;
  bool scales_q_;
  std::vector<std::int64_t> summands_;  // of k, in the order in which they are added
};

template <class Real>
void walk(const Problem& p, const Bindings& bindings, std::uint32_t order, Result& result) {
  Recurrence<Real> recurrence(p, bindings, result, order);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) recurrence.run(b, h);
  }
}

}  // namespace

template <>
void compute_operation<Operation::linear_decode>(const Problem& problem, const Bindings& bindings,
                                                 Arithmetic arithmetic, std::uint32_t order, Result& result) {
  if (!problem.only_flushes()) {
    result[Slot::o].resize(problem.batch * problem.seqlen_q * problem.heads_q * problem.head_dim_v);
  }
  result[Slot::state].resize(problem.linear.states * problem.heads_q * problem.head_dim_qk * problem.head_dim_v);
  if (problem.linear.ring > 0) {
    const std::int64_t rows = problem.linear.states * problem.heads_q * 2 * problem.linear.ring;
    result[Slot::ring_k].resize(rows * problem.head_dim_qk);
    result[Slot::ring_v].resize(rows * problem.head_dim_v);
  }
  if (arithmetic == Arithmetic::oracle) {
    walk<double>(problem, bindings, order, result);
  } else {
    walk<float>(problem, bindings, order, result);
  }
}

}  // namespace tessera::reference
