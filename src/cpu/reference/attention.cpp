// SPDX-License-Identifier: Apache-2.0
#include "cpu/reference/attention.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/parallel.h"
#include "cpu/reference/descales.h"
#include "cpu/reference/operations.h"

namespace tessera::reference {
namespace {

DType narrowest(const Problem& problem) {
  DType step = DType::fp32;
  for (const DType dtype : {problem.q_type, problem.k_type, problem.v_type}) {
    if (size_of(dtype) == 1) continue;  // times its descale it is a number of fp32
    if (format_of(dtype).digits < format_of(step).digits) step = dtype;
  }
  return step;
}

/// Does not use read(), because a 64-bit scalar would lose its low bits in a double.
std::uint64_t scalar(const Tensor& tensor, std::uint64_t otherwise) {
  return tensor ? *tensor.as<std::uint64_t>() : otherwise;
}

}  // namespace

template <class Real>
Attention<Real>::Attention(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order,
                           bool of_bytes)
    : problem_(problem),
      in_(bindings),
      result_(result),
      sequences_(resolve_sequences(problem, bindings)),
      tiles_(problem, problem.pass == Pass::backward && problem.bwd_list ? problem.bwd_list : problem.list, bindings,
             problem.pass == Pass::backward && problem.bwd_list),
      score_(bindings.score),
      mask_(bindings.mask),
      step_(order % 2 == 0 ? narrowest(problem) : DType::fp32),
      rounding_scale_(static_cast<Real>(std::exp2(-std::fmod(order * 0.6180339887498949, 1.0)))),
      order_(order),
      other_form_(order % 2 != 0),
      of_bytes_(of_bytes),
      d_(problem.head_dim_qk),
      dv_(problem.head_dim_v),
      dims_(shuffled(d_)),
      value_dims_(shuffled(dv_)),
      threshold_(dropout_threshold(problem.dropout)),
      seed_(scalar(bindings[Slot::dropout_seed], bindings.seed)),
      philox_offset_(scalar(bindings[Slot::dropout_offset], bindings.offset)),
      weighs_(problem.pass == Pass::forward &&
              (problem.mass != MassKind::none || problem.next != TileList::Form::none)) {
  if (score_.value == nullptr && !problem.score.empty()) score_ = builtin_score(problem.score).value();
  if (mask_.visible == nullptr && !problem.mask.empty()) mask_ = builtin_mask(problem.mask).value();
  if (problem.score.empty()) score_ = {};
  if (problem.mask.empty()) mask_ = {};
  size_outputs();
}

template <class Real>
void Attention<Real>::size_outputs() {
  const auto size = [this](Slot slot, std::int64_t count) { result_[slot].resize(count); };
  const std::int64_t rows = sequences_.query_tokens * problem_.heads_q;
  const std::int64_t blocks = problem_.batch * problem_.heads_q * problem_.query_blocks();
  if (problem_.pass == Pass::forward) {
    size(Slot::o, rows * dv_);
    if (problem_.residual) size(Slot::o_residual, rows * dv_);
    if (problem_.lse) size(Slot::lse, rows);
    const bool mass = problem_.mass != MassKind::none;
    const bool next = problem_.next != TileList::Form::none;
    if (weighs_) mass_.assign(static_cast<std::size_t>(blocks * problem_.key_blocks()), Real{0});
    if (mass) size(Slot::tile_mass, blocks * problem_.key_blocks());
    if (problem_.next == TileList::Form::indices) {
      size(Slot::next_counts, blocks);
      size(Slot::next_indices, blocks * problem_.key_blocks());
    } else if (next) {
      size(Slot::next_bits, blocks * ((problem_.key_blocks() + 31) / 32));
    }
    if (problem_.skip) {
      const bool by_mass = problem_.skip.kind == SkipRule::Kind::mass;
      mass_.assign(static_cast<std::size_t>(blocks * problem_.key_blocks()), by_mass ? Real{0} : -kInfinity);
      unknown_.assign(static_cast<std::size_t>(blocks), 0);
      size(Slot::tile_bits, blocks * ((problem_.key_blocks() + 31) / 32));
      if (by_mass) size(Slot::skip_memory, blocks * problem_.key_blocks());
      if (by_mass) size(Slot::skip_lse, rows);
    }
    return;
  }
  size(Slot::dq, rows * d_);
  for (std::size_t s = 0; s < sequences_.keys.size(); ++s) {
    size(segment_slots(s).dk, sequences_.key_tokens[s] * problem_.heads_kv * d_);
    size(segment_slots(s).dv, sequences_.key_tokens[s] * problem_.heads_kv * dv_);
  }
  if (problem_.sink) size(Slot::dsink, problem_.heads_q);
}

template <class Real>
void Attention<Real>::run() {
  const bool forward = problem_.pass == Pass::forward;
  detail::Workers workers(1, in_.interrupt);
  for (std::int64_t h = 0; !forward && problem_.sink && h < problem_.heads_q; ++h) {
    add_gradient(Slot::dsink, h, h * in_[Slot::dsink].strides[0], 0);
  }
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const Rows& rows = sequences_.query[static_cast<std::size_t>(b)];
    for (std::int64_t head_kv = 0; head_kv < problem_.heads_kv; ++head_kv) {
      load_keys(b, head_kv);
      for (std::int64_t h = head_kv * problem_.group(); h < (head_kv + 1) * problem_.group(); ++h) {
        for (const std::int64_t i : shuffled(rows.length)) {
          workers.throw_if_stopped();
          const Row row{b, h, i, rows.position + i, rows.first_token + i};
          if (forward) {
            forward_row(row);
          } else {
            backward_row(row);
          }
        }
        write_padding(b, h);
        if (weighs_) finish_mass(b, h);
        if (problem_.skip) finish_skip(b, h);
      }
      if (!forward) write_key_gradients(b, head_kv);
    }
  }
}

template <class Real>
void Attention<Real>::load_keys(std::int64_t batch, std::int64_t head_kv) {
  keys_.clear();
  for (std::size_t s = 0; s < sequences_.keys.size(); ++s) {
    const Rows& rows = sequences_.keys[s][static_cast<std::size_t>(batch)];
    const std::int64_t first_block = s == 0 ? 0 : problem_.key_blocks_first();
    for (std::int64_t j = 0; j < rows.length; ++j) {
      keys_.push_back({rows.position + j, first_block + j / problem_.block_kv, s, j});
    }
  }
  const std::size_t n = keys_.size();
  const auto d = static_cast<std::size_t>(d_);
  const auto dv = static_cast<std::size_t>(dv_);
  k_.resize(n * d);
  v_.resize(n * dv);
  k_by_dim_.resize(n * d);
  v_by_dim_.resize(n * dv);
  for (std::size_t j = 0; j < n; ++j) {
    const Key& key = keys_[j];
    const SegmentSlots& slots = segment_slots(key.segment);
    const std::int64_t token = key_token(problem_, in_, key.segment, batch,
                                         sequences_.keys[key.segment][static_cast<std::size_t>(batch)], key.index);
    const Tensor& k = in_[slots.k];
    const Tensor& v = in_[slots.v];
    const std::int64_t k_at = token_offset(k, token, head_kv);
    const std::int64_t v_at = token_offset(v, token, head_kv);
    auto k_descale = static_cast<Real>(key_descale(problem_, in_[Slot::k_descale], batch, head_kv, key.index, token));
    auto v_descale = static_cast<Real>(key_descale(problem_, in_[Slot::v_descale], batch, head_kv, key.index, token));
    if (of_bytes_) {  // all keys share one, which multiplies sums instead
      k_factor_ = std::exchange(k_descale, Real{1});
      v_factor_ = std::exchange(v_descale, Real{1});
    }
    for (std::size_t c = 0; c < d; ++c) {
      k_[j * d + c] = static_cast<Real>(read(k, k_at + static_cast<std::int64_t>(c))) * k_descale +
                      static_cast<Real>(mean_of(in_[Slot::k_mean], batch, head_kv, static_cast<std::int64_t>(c)));
      k_by_dim_[c * n + j] = k_[j * d + c];
    }
    for (std::size_t c = 0; c < dv; ++c) {
      v_[j * dv + c] = static_cast<Real>(read(v, v_at + static_cast<std::int64_t>(c))) * v_descale;
      v_by_dim_[c * n + j] = v_[j * dv + c];
    }
  }
  scores_.resize(n);
  slopes_.resize(n);
  dp_.resize(n);
  dk_.assign(n * d, 0);
  dv_grad_.assign(n * dv, 0);
}

template <class Real>
void Attention<Real>::load_row(const Tensor& tensor, const Row& row, std::vector<Real>& to) const {
  const std::int64_t at = token_offset(tensor, row.token, row.head);
  to.resize(static_cast<std::size_t>(tensor.shape[static_cast<std::size_t>(tensor.rank - 1)]));
  for (std::size_t c = 0; c < to.size(); ++c)
    to[c] = static_cast<Real>(read(tensor, at + static_cast<std::int64_t>(c)));
}

/// Shuffles by Fisher and Yates, unless the order is the natural one.
template <class Real>
void Attention<Real>::shuffle(std::vector<std::int64_t>& order) {
  if (order_ == 0) return;
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[philox({shuffles_++, 0, 0, 0}, {order_, 0})[0] % i]);
  }
}

template <class Real>
std::vector<std::int64_t> Attention<Real>::shuffled(std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  shuffle(order);
  return order;
}

template <class Real>
std::int64_t Attention<Real>::chunk_of(std::int64_t position) const {
  const std::int64_t chunk = position / problem_.chunk;
  return position % problem_.chunk < 0 ? chunk - 1 : chunk;
}

template <class Real>
void Attention<Real>::find_visible(const Row& row) {
  visible_.clear();
  const std::int64_t query_block = row.index / problem_.block_q;
  for (std::size_t j = 0; j < keys_.size(); ++j) {
    const Key& key = keys_[j];
    const std::int64_t distance = key.position - row.position;
    if (problem_.window.left && distance < -*problem_.window.left) continue;
    if (problem_.window.right && distance > *problem_.window.right) continue;
    if (problem_.compressed_causal &&
        key.position * problem_.compressed_causal->stride + problem_.compressed_causal->length > row.position + 1) {
      continue;
    }
    if (problem_.chunk > 0 && chunk_of(key.position) != chunk_of(row.position)) continue;
    const TileState tile = tiles_.at(row.batch, row.head, query_block, key.block);
    if (tile == TileState::skipped) continue;
    if (mask_.visible != nullptr && tile == TileState::partial &&
        !mask_.visible({row.batch + in_.batch_offset, row.head + in_.head_offset, row.position, key.position},
                       mask_.user)) {
      continue;
    }
    visible_.push_back(static_cast<std::int64_t>(j));
  }
}

/// Order: scale, softcap, score callable, ALiBi. `slope` becomes d score / d dot.
template <class Real>
Real Attention<Real>::score(const Row& row, std::int64_t key, Real dot, Real& slope) const {
  const auto scale = static_cast<Real>(problem_.softmax_scale());
  Real x = other_form_ ? dot : round(round(dot) * scale);
  slope = scale;
  if (problem_.softcap > 0) {
    const auto cap = static_cast<Real>(problem_.softcap);
    const Real u = x / cap;
    x = round(cap * std::tanh(u));
    slope /= std::cosh(u) * std::cosh(u);  // 1 − tanh² without its cancellation
  }
  const std::int64_t position = keys_[static_cast<std::size_t>(key)].position;
  if (score_.value != nullptr) {
    const ScorePoint at{row.batch + in_.batch_offset, row.head + in_.head_offset, row.position, position};
    if (problem_.pass == Pass::backward) slope *= static_cast<Real>(score_.derivative(x, at, score_.user));
    x = round(static_cast<Real>(score_.value(x, at, score_.user)));
  }
  if (problem_.alibi) {
    const Tensor& slopes = in_[Slot::alibi_slopes];
    const std::int64_t at =
        slopes.rank == 1 ? row.head * slopes.strides[0] : row.batch * slopes.strides[0] + row.head * slopes.strides[1];
    const std::int64_t distance = row.position > position ? row.position - position : position - row.position;
    x = round(x - static_cast<Real>(read(slopes, at)) * static_cast<Real>(distance));
  }
  return x;
}

template <class Real>
void Attention<Real>::score_row(const Row& row) {
  find_visible(row);
  if (visible_.empty()) return;
  load_row(in_[Slot::q], row, q_);
  const auto q_descale =
      static_cast<Real>(query_descale(problem_, in_[Slot::q_descale], row.batch, row.head, row.index, row.token));
  for (Real& q : q_) q *= of_bytes_ ? Real{1} : q_descale;
  first_ = static_cast<std::size_t>(visible_.front());
  last_ = static_cast<std::size_t>(visible_.back()) + 1;
  shuffle(visible_);
  std::fill(&scores_[first_], &scores_[first_] + (last_ - first_), Real{0});
  if (of_bytes_) multiply_byte_keys(q_descale * k_factor_);
  for (const std::int64_t c : dims_) {
    if (of_bytes_) break;
    const auto dim = static_cast<std::size_t>(c);
    const Real q = other_form_ ? q_[dim] * static_cast<Real>(problem_.softmax_scale()) : q_[dim];
    add_scaled(&scores_[first_], q, &k_by_dim_[dim * keys_.size() + first_], last_ - first_);
  }
  for (const std::int64_t j : visible_) {
    const auto at = static_cast<std::size_t>(j);
    scores_[at] = score(row, j, scores_[at], slopes_[at]);
  }
}

template <class Real>
bool Attention<Real>::kept(const Row& row, std::int64_t key) const {
  const std::int64_t batch_head = (row.batch + in_.batch_offset) * problem_.heads_q + row.head + in_.head_offset;
  return dropout_draw(seed_, philox_offset_, static_cast<std::uint32_t>(batch_head),
                      static_cast<std::uint32_t>(row.position),
                      static_cast<std::uint32_t>(keys_[static_cast<std::size_t>(key)].position)) < threshold_;
}

template class Attention<double>;
template class Attention<float>;

template <>
void compute_operation<Operation::attention>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                             std::uint32_t order, Result& result) {
  if (arithmetic == Arithmetic::oracle) {
    Attention<double>(problem, bindings, result, order).run();
  } else {
    Attention<float>(problem, bindings, result, order, arithmetic == Arithmetic::byte_products).run();
  }
}

}  // namespace tessera::reference
