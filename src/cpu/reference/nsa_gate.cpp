// SPDX-License-Identifier: Apache-2.0
// The oracle's nsa_gate: row after row, head after head.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "cpu/reference/linear.h"
#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

constexpr std::int64_t kBranches = 3;

template <class Real>
class Gates {
 public:
  Gates(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order)
      : p_(problem), bindings_(bindings), result_(result) {
    columns_ = shuffled(p_.head_dim_qk, order);
    columns_v_ = shuffled(p_.head_dim_v, order);
    branches_ = shuffled(kBranches, order);
    order_ = order;
  }

  void run() {
    const bool varlen = p_.q_layout == Layout::varlen;
    const std::int64_t capacity = varlen ? p_.total_q : p_.batch * p_.seqlen_q;
    rows_ = capacity * p_.heads_q;
    if (p_.pass == Pass::forward) {
      result_[Slot::o].resize(rows_ * p_.head_dim_v);
    } else {
      result_[Slot::do_parts].resize(kBranches * rows_ * p_.head_dim_v);
      if (p_.nsa.gate == GateKind::sigmoid) {
        result_[Slot::dq].resize(rows_ * p_.head_dim_qk);
        result_[Slot::dgate_weight].resize(p_.heads_q * kBranches * p_.head_dim_qk);
      }
      if (p_.nsa.gate == GateKind::given) result_[Slot::dgates].resize(rows_ * kBranches);
    }
    std::int64_t tokens = 0;
    for (const Rows& sequence : resolve_sequences(p_, bindings_).query) tokens += sequence.length;
    for (std::int64_t h = 0; h < p_.heads_q; ++h) {
      dweight_.assign(static_cast<std::size_t>(kBranches * p_.head_dim_qk), 0);
      for (const std::int64_t token : shuffled(tokens, order_)) {
        if (p_.pass == Pass::forward) {
          forward(token, h);
        } else {
          backward(token, h);
        }
      }
      for (std::size_t i = 0; i < dweight_.size() && !result_[Slot::dgate_weight].values.empty(); ++i) {
        put(Slot::dgate_weight, h * kBranches * p_.head_dim_qk + static_cast<std::int64_t>(i), dweight_[i]);
      }
    }
  }

 private:
  void forward(std::int64_t token, std::int64_t h) {
    const std::array<Real, kBranches> gates = gates_of(token, h);
    for (std::int64_t c = 0; c < p_.head_dim_v; ++c) {
      Real sum = 0;
      for (const std::int64_t x : branches_) {
        if (gates[static_cast<std::size_t>(x)] == 0) continue;
        sum += gates[static_cast<std::size_t>(x)] * branch(token, h, x, c);
      }
      put(Slot::o, (token * p_.heads_q + h) * p_.head_dim_v + c, sum);
    }
  }

  void backward(std::int64_t token, std::int64_t h) {
    const std::array<Real, kBranches> gates = gates_of(token, h);
    const std::int64_t row = token * p_.heads_q + h;
    const Tensor& dout = bindings_[Slot::dout];
    const std::int64_t at = token_offset(dout, token, h);
    std::array<Real, kBranches> gradients{};
    for (std::int64_t x = 0; x < kBranches; ++x) {
      for (const std::int64_t c : columns_v_) {
        const Real incoming = static_cast<Real>(read(dout, at + c));
        gradients[static_cast<std::size_t>(x)] += incoming * branch(token, h, x, c);
        put(Slot::do_parts, (x * rows_ + row) * p_.head_dim_v + c, gates[static_cast<std::size_t>(x)] * incoming);
      }
      if (p_.nsa.gate == GateKind::given) {
        put(Slot::dgates, row * kBranches + x, gradients[static_cast<std::size_t>(x)]);
      }
    }
    if (p_.nsa.gate != GateKind::sigmoid) return;
    for (std::size_t x = 0; x < kBranches; ++x) gradients[x] *= gates[x] * (1 - gates[x]);
    for (std::int64_t c = 0; c < p_.head_dim_qk; ++c) {
      Real sum = 0;
      for (const std::int64_t x : branches_) {
        sum += gradients[static_cast<std::size_t>(x)] * weight(h, x, c);
        dweight_[static_cast<std::size_t>(x * p_.head_dim_qk + c)] +=
            gradients[static_cast<std::size_t>(x)] * query(token, h, c);
      }
      put(Slot::dq, row * p_.head_dim_qk + c, sum);
    }
  }

  [[nodiscard]] std::array<Real, kBranches> gates_of(std::int64_t token, std::int64_t h) const {
    std::array<Real, kBranches> gates{};
    for (std::int64_t x = 0; x < kBranches; ++x) {
      Real& gate = gates[static_cast<std::size_t>(x)];
      if (p_.nsa.gate == GateKind::mean) {
        gate = Real(1) / kBranches;
      } else if (p_.nsa.gate == GateKind::given) {
        const Tensor& given = bindings_[Slot::gates];
        gate = static_cast<Real>(read(given, token_offset(given, token, h) + x));
      } else {
        Real logit = 0;
        for (const std::int64_t c : columns_) logit += query(token, h, c) * weight(h, x, c);
        gate = 1 / (1 + std::exp(-logit));
      }
    }
    return gates;
  }

  static std::vector<std::int64_t> shuffled(std::int64_t count, std::uint32_t order) {
    std::vector<std::int64_t> list(static_cast<std::size_t>(count));
    std::iota(list.begin(), list.end(), 0);
    if (order != 0) std::shuffle(list.begin(), list.end(), std::mt19937(order));
    return list;
  }
  [[nodiscard]] Real query(std::int64_t token, std::int64_t h, std::int64_t c) const {
    const Tensor& q = bindings_[Slot::q];
    return static_cast<Real>(read(q, token_offset(q, token, h) + c));
  }
  [[nodiscard]] Real weight(std::int64_t h, std::int64_t x, std::int64_t c) const {
    const Tensor& w = bindings_[Slot::gate_weight];
    return static_cast<Real>(read(w, h * w.strides[0] + x * w.strides[1] + c));
  }
  [[nodiscard]] Real branch(std::int64_t token, std::int64_t h, std::int64_t x, std::int64_t c) const {
    const Tensor& parts = bindings_[Slot::o_parts];
    std::int64_t at = x * parts.strides[0] + c;
    if (parts.rank == 4) {
      at += token * parts.strides[1] + h * parts.strides[2];
    } else {
      at += token / p_.seqlen_q * parts.strides[1] + token % p_.seqlen_q * parts.strides[2] + h * parts.strides[3];
    }
    return static_cast<Real>(read(parts, at));
  }
  void put(Slot to, std::int64_t index, Real value) {
    put_result<Real>(result_[to], bindings_[to].dtype, index, static_cast<double>(value));
  }

  const Problem& p_;
  const Bindings& bindings_;
  Result& result_;
  std::uint32_t order_ = 0;
  std::int64_t rows_ = 0;                                     // tokens · heads
  std::vector<std::int64_t> columns_, columns_v_, branches_;  // in the order in which they are added
  std::vector<Real> dweight_;                                 // of one head
};

}  // namespace

template <>
void compute_operation<Operation::nsa_gate>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                            std::uint32_t order, Result& result) {
  if (arithmetic == Arithmetic::oracle) {
    Gates<double>(problem, bindings, result, order).run();
  } else {
    Gates<float>(problem, bindings, result, order).run();
  }
}

}  // namespace tessera::reference
