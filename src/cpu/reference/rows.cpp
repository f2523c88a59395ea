// SPDX-License-Identifier: Apache-2.0
// The rows of the oracle's attention: softmax and its backward.
#include <algorithm>
#include <cmath>

#include "cpu/reference/attention.h"

namespace tessera::reference {

template <class Real>
void Attention<Real>::forward_row(const Row& row) {
  score_row(row);
  Real largest = -kInfinity;
  bool empty = true;
  for (const std::int64_t j : visible_) {
    const Real s = scores_[static_cast<std::size_t>(j)];
    largest = std::max(largest, s);
    if (s != -kInfinity) empty = false;  // a NaN is no empty row
  }
  const Rows& rows = sequences_.query[static_cast<std::size_t>(row.batch)];
  const std::int64_t lse_at = lse_index(problem_, row.batch, row.head, rows, row.index);
  const std::int64_t o_at = (row.token * problem_.heads_q + row.head) * dv_;
  o_.assign(static_cast<std::size_t>(dv_), 0);
  Real lse = -kInfinity;
  if (!empty) {
    Real sum = 0;
    for (const std::int64_t j : visible_) sum += exponential(scores_[static_cast<std::size_t>(j)], largest);
    lse = largest + std::log(sum);
    Real normalise_at = largest;  // P = exp(score − normalise_at) / denominator
    Real denominator = sum;
    if (problem_.sink) {
      const auto sink = static_cast<Real>(read(in_[Slot::sink], row.head * in_[Slot::sink].strides[0]));
      normalise_at = std::max(largest, sink);
      denominator = sum * std::exp(largest - normalise_at) + std::exp(sink - normalise_at);
    }
    if (of_bytes_) weigh_byte_values(row, normalise_at, denominator);
    for (const std::int64_t j : visible_) {
      if (of_bytes_) break;
      Real p = round(exponential(scores_[static_cast<std::size_t>(j)], normalise_at) / denominator);
      if (problem_.dropout > 0) {
        p = kept(row, j) ? round(p * (Real{65536} / static_cast<Real>(threshold_))) : Real{0};
        if (p == 0) continue;
      }
      add_scaled(o_.data(), p, &v_[static_cast<std::size_t>(j * dv_)], o_.size());
    }
    // Every P is NaN: so is the output, even if dropout drops all keys.
    if (std::isnan(lse)) std::fill(o_.begin(), o_.end(), lse);
  }
  for (std::int64_t c = 0; c < dv_; ++c) {
    put(Slot::o, o_at + c, round_as(problem_.o_type, o_[static_cast<std::size_t>(c)]));
    if (problem_.residual) put(Slot::o_residual, o_at + c, o_[static_cast<std::size_t>(c)]);
  }
  if (problem_.lse) put(Slot::lse, lse_at, lse);
  if (weighs_) add_mass(row, lse);
  if (problem_.skip) skip_row(row, lse);
}

/// Adds the row's mass in each tile (or its square) to the block's sums.
template <class Real>
void Attention<Real>::add_mass(const Row& row, Real lse) {
  if (problem_.mass_prior_lse) {
    const Tensor& prior = in_[Slot::prior_lse];
    const Rows& rows = sequences_.query[static_cast<std::size_t>(row.batch)];
    lse = static_cast<Real>(read(prior, lse_offset(prior, row.batch, row.head, rows, row.index)));
  }
  if (lse == -kInfinity) return;
  const std::int64_t query_block = row.index / problem_.block_q;
  const std::int64_t first =
      ((row.batch * problem_.heads_q + row.head) * problem_.query_blocks() + query_block) * problem_.key_blocks();
  row_mass_.assign(static_cast<std::size_t>(problem_.key_blocks()), Real{0});
  for (const std::int64_t j : visible_) {
    const auto at = static_cast<std::size_t>(j);
    row_mass_[static_cast<std::size_t>(keys_[at].block)] += exponential(scores_[at], lse);
  }
  for (std::size_t block = 0; block < row_mass_.size(); ++block) {
    const Real mass = row_mass_[block];
    mass_[static_cast<std::size_t>(first) + block] += problem_.mass == MassKind::mean ? mass : mass * mass;
  }
}

template <class Real>
void Attention<Real>::finish_mass(std::int64_t batch, std::int64_t head) {
  const std::int64_t length = sequences_.query[static_cast<std::size_t>(batch)].length;
  for (std::int64_t block = 0; block < problem_.query_blocks(); ++block) {
    const std::int64_t rows = std::clamp<std::int64_t>(length - block * problem_.block_q, 0, problem_.block_q);
    const std::int64_t first =
        ((batch * problem_.heads_q + head) * problem_.query_blocks() + block) * problem_.key_blocks();
    for (std::int64_t kb = 0; kb < problem_.key_blocks(); ++kb) {
      Real& mass = mass_[static_cast<std::size_t>(first + kb)];
      if (rows > 0) mass /= static_cast<Real>(rows);
      if (problem_.mass != MassKind::mean) mass = std::sqrt(mass);
      if (problem_.mass != MassKind::none) put(Slot::tile_mass, first + kb, mass);
    }
  }
  if (problem_.next != TileList::Form::none) write_next(batch, head);
  result_.next_mass.assign(mass_.begin(), mass_.end());
}

template <class Real>
void Attention<Real>::write_next(std::int64_t batch, std::int64_t head) {
  const std::int64_t key_blocks = problem_.key_blocks();
  const std::int64_t words = (key_blocks + 31) / 32;
  for (std::int64_t block = 0; block < problem_.query_blocks(); ++block) {
    const std::int64_t row = (batch * problem_.heads_q + head) * problem_.query_blocks() + block;
    std::vector<std::int64_t> kept_blocks;
    for (std::int64_t kb = 0; kb < key_blocks; ++kb) {
      if (mass_[static_cast<std::size_t>(row * key_blocks + kb)] > static_cast<double>(problem_.next_threshold)) {
        kept_blocks.push_back(kb);
      }
    }
    if (problem_.next == TileList::Form::indices) {
      put(Slot::next_counts, row, static_cast<double>(kept_blocks.size()));
      for (std::int64_t entry = 0; entry < key_blocks; ++entry) {
        const auto at = static_cast<std::size_t>(entry);
        put(Slot::next_indices, row * key_blocks + entry,
            at < kept_blocks.size() ? static_cast<double>(kept_blocks[at]) : -1.0);
      }
      continue;
    }
    std::vector<std::uint32_t> bits(static_cast<std::size_t>(words), 0);
    for (const std::int64_t kb : kept_blocks) bits[static_cast<std::size_t>(kb / 32)] |= 1U << (kb % 32);
    for (std::int64_t w = 0; w < words; ++w) put(Slot::next_bits, row * words + w, bits[static_cast<std::size_t>(w)]);
  }
}

template <class Real>
void Attention<Real>::backward_row(const Row& row) {
  const std::int64_t dq_at = (row.token * problem_.heads_q + row.head) * d_;
  const Rows& rows = sequences_.query[static_cast<std::size_t>(row.batch)];
  const auto lse =
      static_cast<Real>(read(in_[Slot::lse], lse_offset(in_[Slot::lse], row.batch, row.head, rows, row.index)));
  dq_.assign(static_cast<std::size_t>(d_), 0);
  if (lse != -kInfinity) {
    load_row(in_[Slot::dout], row, dout_);
    load_row(in_[Slot::o], row, o_);
    if (problem_.residual) add_residual(row);
    // Sums from the last to the first. In the order of dP, dP − delta would show no rounding error if o equals a v.
    Real delta = 0;
    for (std::size_t c = value_dims_.size(); c-- > 0;) {
      const auto dim = static_cast<std::size_t>(value_dims_[c]);
      delta += dout_[dim] * o_[dim];
    }
    Real lse_sink = lse;
    if (problem_.sink) {
      const auto sink = static_cast<Real>(read(in_[Slot::sink], row.head * in_[Slot::sink].strides[0]));
      const Real larger = std::max(lse, sink);
      lse_sink = larger + std::log(std::exp(lse - larger) + std::exp(sink - larger));
      const Real share = other_form_ ? flush(1 / (1 + std::exp(lse - sink))) : exponential(sink, lse_sink);
      double& dsink = result_[Slot::dsink].values[static_cast<std::size_t>(row.head)];
      dsink = static_cast<Real>(dsink) - share * delta;
    }
    const Real dlse = problem_.dlse ? static_cast<Real>(read(in_[Slot::dlse], lse_offset(in_[Slot::dlse], row.batch,
                                                                                         row.head, rows, row.index)))
                                    : Real{0};
    score_row(row);
    if (!visible_.empty()) {
      std::fill(&dp_[first_], &dp_[first_] + (last_ - first_), Real{0});
      for (const std::int64_t c : value_dims_) {
        const auto dim = static_cast<std::size_t>(c);
        add_scaled(&dp_[first_], dout_[dim], &v_by_dim_[dim * keys_.size() + first_], last_ - first_);
      }
    }
    for (const std::int64_t j : visible_) {
      const auto at = static_cast<std::size_t>(j);
      const Real s = scores_[at];
      const Real p = round(exponential(s, lse_sink));
      Real dropped = p;
      Real dp = round(dp_[at]);
      if (problem_.dropout > 0) {
        const Real keep = kept(row, j) ? Real{65536} / static_cast<Real>(threshold_) : Real{0};
        dropped = round(p * keep);
        dp = keep == 0 ? Real{0} : round(dp * keep);
      }
      Real ds = p * (dp - delta);
      if (problem_.dlse) ds += dlse * exponential(s, lse);
      // A score that a callable made −∞ has weight 0, and may have no finite derivative.
      const Real rounded = round(ds);
      const Real dot_gradient = rounded == 0 ? Real{0} : round(rounded * slopes_[at]);
      add_scaled(dq_.data(), dot_gradient, &k_[at * dq_.size()], dq_.size());
      add_scaled(&dk_[at * q_.size()], dot_gradient, q_.data(), q_.size());
      if (dropped != 0) add_scaled(&dv_grad_[at * dout_.size()], dropped, dout_.data(), dout_.size());
    }
  }
  const Tensor& tensor = in_[Slot::dq];
  const std::int64_t offset = tensor ? token_offset(tensor, row.token, row.head) : 0;
  for (std::int64_t c = 0; c < d_; ++c) {
    add_gradient(Slot::dq, dq_at + c, offset + c, dq_[static_cast<std::size_t>(c)]);
  }
}

/// Adds the residual: o_ becomes O before its rounding, or nearly so.
template <class Real>
void Attention<Real>::add_residual(const Row& row) {
  const Tensor& residual = in_[Slot::o_residual];
  const std::int64_t at = token_offset(residual, row.token, row.head);
  for (std::size_t c = 0; c < o_.size(); ++c) {
    o_[c] = static_cast<Real>(with_residual(problem_.o_type, o_[c], read(residual, at + static_cast<std::int64_t>(c))));
  }
}

/// Stores a gradient, plus what the bound tensor holds if gradients accumulate. `offset`: in the bound tensor.
template <class Real>
void Attention<Real>::add_gradient(Slot slot, std::int64_t index, std::int64_t offset, Real gradient) {
  const Tensor& tensor = in_[slot];
  if (problem_.accumulate) gradient += static_cast<Real>(read(tensor, offset));
  DType dtype = DType::fp32;
  if (!problem_.grad_fp32) {
    if (slot == Slot::dq) dtype = problem_.q_type;
    if (slot == Slot::dk || slot == Slot::dk2) dtype = problem_.k_type;
    if (slot == Slot::dv || slot == Slot::dv2) dtype = problem_.v_type;
  }
  put(slot, index, round_as(dtype, gradient));
}

template <class Real>
void Attention<Real>::write_key_gradients(std::int64_t batch, std::int64_t head_kv) {
  std::size_t first_key = 0;
  for (std::size_t s = 0; s < sequences_.keys.size(); ++s) {
    const Rows& rows = sequences_.keys[s][static_cast<std::size_t>(batch)];
    const SegmentSlots& slots = segment_slots(s);
    for (std::int64_t j = 0; j < rows.capacity; ++j) {
      const std::int64_t token = rows.first_token + j;
      const auto write = [&](Slot slot, std::int64_t dim, const std::vector<Real>& gradients) {
        const std::int64_t index = (token * problem_.heads_kv + head_kv) * dim;
        const std::int64_t offset = in_[slot] ? token_offset(in_[slot], token, head_kv) : 0;
        const std::int64_t from = (static_cast<std::int64_t>(first_key) + j) * dim;
        for (std::int64_t c = 0; c < dim; ++c) {
          add_gradient(slot, index + c, offset + c,
                       j < rows.length ? gradients[static_cast<std::size_t>(from + c)] : 0);
        }
      };
      write(slots.dk, d_, dk_);
      write(slots.dv, dv_, dv_grad_);
    }
    first_key += static_cast<std::size_t>(rows.length);
  }
}

/// Writes the rows of the tensor that belong to the sequence but are past its length.
template <class Real>
void Attention<Real>::write_padding(std::int64_t batch, std::int64_t head) {
  const Rows& rows = sequences_.query[static_cast<std::size_t>(batch)];
  for (std::int64_t i = rows.length; i < rows.capacity; ++i) {
    const std::int64_t token = rows.first_token + i;
    const std::int64_t index = token * problem_.heads_q + head;
    if (problem_.pass == Pass::backward) {
      const std::int64_t offset = in_[Slot::dq] ? token_offset(in_[Slot::dq], token, head) : 0;
      for (std::int64_t c = 0; c < d_; ++c) add_gradient(Slot::dq, index * d_ + c, offset + c, 0);
      continue;
    }
    for (std::int64_t c = 0; c < dv_; ++c) {
      put(Slot::o, index * dv_ + c, 0);
      if (problem_.residual) put(Slot::o_residual, index * dv_ + c, 0);
    }
    if (problem_.lse)
      put(Slot::lse, lse_index(problem_, batch, head, rows, i), -std::numeric_limits<double>::infinity());
  }
}

template class Attention<double>;
template class Attention<float>;

}  // namespace tessera::reference
