// SPDX-License-Identifier: Apache-2.0
// The operation `linear_chunk`: whole sequences of linear attention with a decay for each head, and the gradient.
// It does the walks of operations/linear_walks.h a chunk of tokens at a time, by matrix products in fp32.
#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/scores/non_finite.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/sequence.h"
#include "operations/linear_walks.h"

namespace tessera::cpu {
namespace {

using detail::LinearWalk;

constexpr std::int64_t kChunk = kPanel;

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  return has_kernels_of({problem.q_type, problem.k_type, problem.v_type});
}

/// A thread's memory. Rows of `x`, `y` are padded to width_x floats, those of `z`, `s` and `out` to width_z.
struct Buffers {
  Buffers(Arena& arena, std::int64_t longest)
      : x(arena.take<float>(kChunk * longest)),
        y(arena.take<float>(kChunk * longest)),
        y_transposed(arena.take<float>(longest * kChunk)),
        z(arena.take<float>(kChunk * longest)),
        p(arena.take<float>(kChunk * kChunk)),
        out(arena.take<float>(kChunk * longest)),
        s(arena.take<float>(longest * longest)),
        row(arena.take<float>(longest)) {}
  float *x, *y, *y_transposed, *z, *p, *out, *s, *row;
};

std::int64_t longest_row(const Problem& problem) { return padded(std::max(problem.head_dim_qk, problem.head_dim_v)); }

std::size_t thread_bytes(const Problem& problem) {
  Arena counter;
  const Buffers buffers(counter, longest_row(problem));
  return counter.used();
}

void plan(detail::PlanState& state) {
  Arena arena;
  arena.take<std::byte>(state.target.threads, thread_bytes(state.problem));
  state.workspace_bytes = arena.used();
  state.choice = "chunks of " + std::to_string(kChunk) + " tokens, a head of a sequence at a time\n";
}

/// One walk over one head of one sequence.
class Walk {
 public:
  Walk(const Problem& problem, const Bindings& bindings, const Kernels& kernels, const LinearWalk& walk,
       const Sequence& rows, std::int64_t head, const Buffers& buffers)
      : bindings_(bindings), kernels_(kernels), walk_(walk), rows_(rows), head_(head), b_(buffers), problem_(problem) {
    dim_x_ = walk.transposed ? problem.head_dim_v : problem.head_dim_qk;
    dim_z_ = walk.transposed ? problem.head_dim_qk : problem.head_dim_v;
    width_x_ = padded(dim_x_);
    width_z_ = padded(dim_z_);
    lag_ = walk.backwards ? 0 : 1;
    (walk.backwards ? y_scale_ : out_scale_) = problem.softmax_scale();
    const float slope = bindings[Slot::decay_slopes].as<float>()[head];
    power_[0] = 1.0F;  // even if the slope is infinite
    for (std::int64_t n = 1; n <= kChunk; ++n) power_[n] = std::exp(-slope * static_cast<float>(n));
  }

  void run(detail::Workers& workers) const {
    begin();
    for (std::int64_t first = 0; first < rows_.q_length && !workers.stopped(); first += kChunk) {
      const std::int64_t count = std::min(kChunk, rows_.q_length - first);
      load(walk_.x, first, count, dim_x_, b_.x);
      load(walk_.y, first, count, dim_x_, b_.y);
      load(walk_.z, first, count, dim_z_, b_.z);
      outputs(count);
      const RowView to = rows_of(problem_, bindings_[walk_.out], rows_);
      for (std::int64_t i = 0; i < count; ++i) {
        kernels_.store_row(bindings_[walk_.out].dtype, b_.out + i * width_z_, dim_z_, to.at(token(first + i), head_));
      }
      update(count);
    }
    end();
  }

 private:
  [[nodiscard]] std::int64_t token(std::int64_t step) const {
    return walk_.backwards ? rows_.q_length - 1 - step : step;
  }

  /// Rows past `count` are zeros.
  void load(Slot slot, std::int64_t first, std::int64_t count, std::int64_t dim, float* to) const {
    const Tensor& tensor = bindings_[slot];
    const RowView view = rows_of(problem_, tensor, rows_);
    kernels_.load_rows(tensor.dtype, view.at(token(first), head_), walk_.backwards ? -view.row : view.row, count, dim,
                       1.0F, to, padded(dim));
    std::fill(to + count * padded(dim), to + kChunk * padded(dim), 0.0F);
  }

  void outputs(std::int64_t count) const {
    kernels_.transpose(kChunk, dim_x_, b_.y, width_x_, b_.y_transposed, kChunk);
    kernels_.matmul(count, padded(count), dim_x_, {b_.x, width_x_, 1}, b_.y_transposed, kChunk, b_.p, kChunk, false,
                    nullptr);
    for (std::int64_t i = 0; i < count; ++i) {
      float* row = b_.p + i * kChunk;
      for (std::int64_t j = 0; j <= i; ++j) row[j] *= power_[i - j] * y_scale_ * out_scale_;
      std::fill(row + i + 1, row + kChunk, 0.0F);
      scale(b_.x + i * width_x_, width_x_, out_scale_ * power_[i + lag_]);
    }
    kernels_.matmul(count, width_z_, dim_x_, {b_.x, width_x_, 1}, b_.s, width_z_, b_.out, width_z_, false, nullptr);
    if (kernels_.all_finite(count * width_z_, b_.z)) {
      kernels_.matmul(count, width_z_, count, {b_.p, kChunk, 1}, b_.z, width_z_, b_.out, width_z_, true, nullptr);
    } else {  // later tokens must not contribute
      careful_matmul(kernels_, SkipZerosOf::a, count, width_z_, count, {b_.p, kChunk, 1}, b_.z, width_z_, b_.out,
                     width_z_, true, nullptr);
    }
  }

  void update(std::int64_t count) const {
    for (std::int64_t j = 0; j < count; ++j) {
      scale(b_.y + j * width_x_, width_x_, y_scale_ * power_[count - j - lag_]);
    }
    std::fill_n(b_.row, width_z_, power_[count]);
    kernels_.matmul(dim_x_, width_z_, count, {b_.y, 1, width_x_}, b_.z, width_z_, b_.s, width_z_, true, b_.row);
  }

  static void scale(float* row, std::int64_t n, float factor) {
    for (std::int64_t i = 0; i < n; ++i) row[i] *= factor;
  }

  [[nodiscard]] std::byte* state_row(const Tensor& tensor, std::int64_t index, std::int64_t row) const {
    return tensor.bytes() + (index * tensor.strides[0] + head_ * tensor.strides[1] + row * tensor.strides[2]) *
                                static_cast<std::int64_t>(size_of(tensor.dtype));
  }

  void begin() const {
    std::fill_n(b_.s, dim_x_ * width_z_, 0.0F);
    const std::int64_t index = detail::state_index(bindings_, walk_.first, rows_.batch, false);
    if (index < 0) return;
    const Tensor& state = bindings_[walk_.first];
    if (!detail::rows_of_z(problem_, walk_)) {
      for (std::int64_t x = 0; x < dim_x_; ++x) {
        kernels_.load_row(state.dtype, state_row(state, index, x), dim_z_, 1.0F, b_.s + x * width_z_, width_z_);
      }
      return;
    }
    for (std::int64_t z = 0; z < dim_z_; ++z) {
      kernels_.load_row(state.dtype, state_row(state, index, z), dim_x_, 1.0F, b_.row, width_x_);
      for (std::int64_t x = 0; x < dim_x_; ++x) b_.s[x * width_z_ + z] = b_.row[x];
    }
  }

  void end() const {
    const std::int64_t index = detail::state_index(bindings_, walk_.last, rows_.batch, true);
    if (index < 0) return;
    const Tensor& state = bindings_[walk_.last];
    if (!detail::rows_of_z(problem_, walk_)) {
      for (std::int64_t x = 0; x < dim_x_; ++x) {
        kernels_.store_row(state.dtype, b_.s + x * width_z_, dim_z_, state_row(state, index, x));
      }
      return;
    }
    for (std::int64_t z = 0; z < dim_z_; ++z) {
      for (std::int64_t x = 0; x < dim_x_; ++x) b_.row[x] = b_.s[x * width_z_ + z];
      kernels_.store_row(state.dtype, b_.row, dim_x_, state_row(state, index, z));
    }
  }

  const Bindings& bindings_;
  const Kernels& kernels_;
  const LinearWalk& walk_;
  const Sequence& rows_;
  std::int64_t head_;
  const Buffers& b_;
  const Problem& problem_;
  std::int64_t dim_x_, dim_z_, width_x_, width_z_;
  std::int64_t lag_;
  float y_scale_ = 1.0F, out_scale_ = 1.0F;
  float power_[kChunk + 1];  // of the decay
};

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Kernels& kernels = kernels_for(state.target.isa);
  detail::Workers& workers = resources.workers;
  const std::span<const LinearWalk> walks = detail::linear_walks(problem);
  const std::int64_t heads = problem.batch * problem.heads_q;
  detail::WorkQueue queue(workers, heads * static_cast<std::int64_t>(walks.size()));
  const std::size_t bytes = thread_bytes(problem);
  workers.parallel([&](int thread) {
    Arena arena(resources.workspace + static_cast<std::size_t>(thread) * bytes);
    const Buffers buffers(arena, longest_row(problem));
    queue.drain([&](std::int64_t index) {
      const LinearWalk& walk = walks[static_cast<std::size_t>(index / heads)];
      const std::int64_t head = index % heads;
      const Sequence rows = find_query_rows(problem, bindings, head / problem.heads_q);
      Walk(problem, bindings, kernels, walk, rows, head % problem.heads_q, buffers).run(workers);
    });
  });
}

}  // namespace

const Implementation kLinearChunk = {{"cpu.linear_chunk", DeviceType::cpu, Operation::linear_chunk, supports, plan},
                                     run};

}  // namespace tessera::cpu
