// SPDX-License-Identifier: Apache-2.0
// The start and the end of a tile of the backward: loads keys and queries, stores their gradients.

#include <algorithm>

#include "bindings/slot_rules.h"
#include "cpu/backward/unit.h"

namespace tessera::cpu {

void BackwardUnit::load_keys(std::int64_t begin, std::int64_t count) {
  keys_ = count;
  span_count_ = 0;
  const std::int64_t border = sequence_.segments[0].length;
  for (std::int64_t at = begin; at < begin + count;) {
    const int segment = at < border ? 0 : 1;
    const Segment& source = sequence_.segments[static_cast<std::size_t>(segment)];
    const std::int64_t first = at - (segment == 0 ? 0 : border);
    const std::int64_t block = first / problem_.block_kv;
    std::int64_t end = std::min(source.length, first + begin + count - at);
    if (run_.list.active()) end = std::min(end, (block + 1) * problem_.block_kv);
    b_.spans[span_count_++] = {segment,
                               first,
                               end - first,
                               at - begin,
                               source.position + first,
                               block + (segment == 0 ? 0 : problem_.key_blocks_first()),
                               false};
    at += end - first;
  }
  for (std::int64_t s = 0; s < span_count_; ++s) {
    const Span& span = b_.spans[s];
    const Segment& source = sequence_.segments[static_cast<std::size_t>(span.segment)];
    for (std::int64_t i = 0; i < span.count; ++i) b_.key_position[span.row + i] = span.position + i;
    if (dots_.used()) {
      dots_.load_keys(source, problem_, span.first, span.count, kv_head_, span.row);
      continue;
    }
    cpu::load_keys(run_.kernels, source.k, problem_.k_type, problem_.head_dim_qk, span.first, span.count, kv_head_,
                   b_.k + span.row * d_);
    cpu::load_keys(run_.kernels, source.v, problem_.v_type, problem_.head_dim_v, span.first, span.count, kv_head_,
                   b_.v + span.row * dv_);
  }
  if (dots_.used()) {
    dots_.transpose_keys(run_.kernels, count);
    return;
  }
  const std::int64_t columns = (count + kPanel - 1) / kPanel * kPanel;
  std::fill_n(b_.k + count * d_, (columns - count) * d_, 0.0F);
  std::fill_n(b_.v + count * dv_, (columns - count) * dv_, 0.0F);
  for (std::int64_t first = 0; first < columns; first += kPanel) {
    run_.kernels.transpose(kPanel, d_, b_.k + first * d_, d_, b_.k_t + first * d_, kPanel);
    run_.kernels.transpose(kPanel, dv_, b_.v + first * dv_, dv_, b_.v_t + first * dv_, kPanel);
  }
  std::fill_n(b_.dk, count * d_, 0.0F);
  std::fill_n(b_.dv, count * dv_, 0.0F);
  keys_finite_ = run_.kernels.all_finite(count * d_, b_.k) && run_.kernels.all_finite(count * dv_, b_.v);
}

void BackwardUnit::load_queries(std::int64_t head, std::int64_t begin, std::int64_t rows) {
  const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
  const RowView dout = rows_of(problem_, run_.bindings[Slot::dout], sequence_);
  for (std::int64_t i = 0; i < rows; ++i) {
    b_.query_position[i] = sequence_.q_position + begin + i;
    b_.head[i] = static_cast<std::int32_t>(head);
  }
  if (dots_.used()) {
    const std::int64_t index = run_.rows.at(head, sequence_.q_first + begin);
    dots_.load_queries(run_.kernels, problem_, q, dout, begin, rows, head, run_.rows.shift + index,
                       run_.rows.delta + index);
    return;
  }
  run_.kernels.load_rows(problem_.q_type, q.at(begin, head), q.row, rows, problem_.head_dim_qk,
                         problem_.softmax_scale(), b_.q, d_);
  const float* weight = run_.rows.weight + run_.rows.at(head, sequence_.q_first + begin);
  for (std::int64_t i = 0; i < rows; ++i) {
    run_.kernels.load_row(problem_.o_type, dout.at(begin + i, head), problem_.head_dim_v, weight[i], b_.dout + i * dv_,
                          dv_);
  }
}

void BackwardUnit::store_keys() {
  const float scale = dots_.used() ? problem_.softmax_scale() : 1.0F;  // otherwise q is scaled
  for (std::int64_t s = 0; s < span_count_; ++s) {
    const Span& span = b_.spans[s];
    const detail::SourceSlots& slots = detail::source_slots(span.segment == 1);
    const KeyView dk = keys_of(problem_, run_.bindings, run_.bindings[slots.dk], span.segment, sequence_.batch);
    const KeyView dv = keys_of(problem_, run_.bindings, run_.bindings[slots.dv], span.segment, sequence_.batch);
    for (std::int64_t i = 0; i < span.count; ++i) {
      const std::int64_t row = span.row + i;
      store_gradient(problem_, run_.kernels, gradient_type(problem_, problem_.k_type), dk_row(row),
                     problem_.head_dim_qk, scale, dk.at(span.first + i, kv_head_));
      store_gradient(problem_, run_.kernels, gradient_type(problem_, problem_.v_type), dv_row(row), problem_.head_dim_v,
                     1.0F, dv.at(span.first + i, kv_head_));
    }
  }
}

float* BackwardUnit::dk_row(std::int64_t row) {
  if (!dots_.used()) return b_.dk + row * d_;
  if (row % kDotTile == 0) {
    dots_.transpose_gradients(run_.kernels, row, dots_.gradient_rows, dots_.gradient_rows + kDotTile * dots_.width());
  }
  return dots_.gradient_rows + row % kDotTile * dots_.width();
}

float* BackwardUnit::dv_row(std::int64_t row) const {
  if (!dots_.used()) return b_.dv + row * dv_;
  return dots_.gradient_rows + (kDotTile + row % kDotTile) * dots_.width();
}

void BackwardUnit::clear_unused_keys() {
  if (problem_.accumulate) return;
  float* zeros = dots_.used() ? dots_.gradient_rows : b_.dk;
  std::fill_n(zeros, std::max(d_, dv_), 0.0F);
  for (int segment = 0; segment < (problem_.kv2 ? 2 : 1); ++segment) {
    const Segment& source = sequence_.segments[static_cast<std::size_t>(segment)];
    const detail::SourceSlots& slots = detail::source_slots(segment == 1);
    const KeyView dk = keys_of(problem_, run_.bindings, run_.bindings[slots.dk], segment, sequence_.batch);
    const KeyView dv = keys_of(problem_, run_.bindings, run_.bindings[slots.dv], segment, sequence_.batch);
    for (std::int64_t i = source.length; i < source.capacity; ++i) {
      run_.kernels.store_row(gradient_type(problem_, problem_.k_type), zeros, problem_.head_dim_qk, dk.at(i, kv_head_));
      run_.kernels.store_row(gradient_type(problem_, problem_.v_type), zeros, problem_.head_dim_v, dv.at(i, kv_head_));
    }
  }
}

void store_queries(const BackwardRun& run, const Sequence& sequence, std::int64_t kv_head, float* dq,
                   std::int64_t part_stride) {
  const Problem& problem = run.problem;
  const std::int64_t d = padded(problem.head_dim_qk);
  const DType dtype = gradient_type(problem, problem.q_type);
  const RowView target = rows_of(problem, run.bindings[Slot::dq], sequence);
  alignas(64) float zeros[512] = {};
  for (std::int64_t h = 0; h < problem.group(); ++h) {
    const std::int64_t head = kv_head * problem.group() + h;
    for (std::int64_t row = 0; row < sequence.q_length; ++row) {
      float* sum = dq + (h * sequence.q_length + row) * d;
      for (std::int64_t part = 1; part < run.tiling.parts; ++part) {
        for (std::int64_t i = 0; i < problem.head_dim_qk; ++i) sum[i] += sum[part * part_stride + i];
      }
      store_gradient(problem, run.kernels, dtype, sum, problem.head_dim_qk, problem.softmax_scale(),
                     target.at(row, head));
    }
    for (std::int64_t row = sequence.q_length; row < sequence.q_capacity && !problem.accumulate; ++row) {
      run.kernels.store_row(dtype, zeros, problem.head_dim_qk, target.at(row, head));
    }
  }
}

}  // namespace tessera::cpu
