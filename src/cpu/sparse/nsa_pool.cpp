// SPDX-License-Identifier: Apache-2.0
// The operation `nsa_pool`: means of blocks of tokens, times a matrix of each key head if there is one, and the
// gradient (docs/nsa.md; Yuan et al. 2025).
#include <algorithm>
#include <array>

#include "base/checked.h"
#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/sparse/compressed.h"
#include "cpu/tiles/arena.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kBlocks = 16;      // blocks of a unit of work of the forward, and of a product
constexpr std::int64_t kTokens = 256;     // tokens of a unit of work of the gradient of tokens
constexpr std::int64_t kMatrixRows = 64;  // rows of a unit of work of the gradient of a projection

/// A thread's memory; rows are padded to `width` floats.
struct Buffers {
  Buffers(Arena& arena, const Problem& problem) {
    const std::int64_t width = padded(std::max(problem.head_dim_qk, problem.head_dim_v));
    tokens = arena.take<float>(kTokens, width);
    blocks = arena.take<float>(kBlocks, width);
    products = arena.take<float>(kBlocks, width);
    if (!problem.nsa.project) return;
    matrix = arena.take<float>(width, width);
    transposed = arena.take<float>(width, width);
  }
  float *tokens, *blocks, *products, *matrix = nullptr, *transposed = nullptr;
};

std::size_t thread_bytes(const Problem& problem) {
  Arena counter;
  const Buffers buffers(counter, problem);
  return counter.used();
}

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  return has_kernels_of({problem.k_type, problem.v_type});
}

void plan(detail::PlanState& state) {
  Arena arena;
  arena.take<std::int64_t>(state.problem.batch);
  arena.take<std::byte>(state.target.threads, thread_bytes(state.problem));
  state.workspace_bytes = arena.used();
  state.choice = "units of " + std::to_string(state.problem.pass == Pass::forward ? kBlocks : kTokens) +
                 (state.problem.pass == Pass::forward ? " blocks" : " tokens") + " of a head\n";
}

/// One head of one sequence, of K or of V.
class Head {
 public:
  Head(const Problem& problem, const Bindings& bindings, const Kernels& kernels, const detail::PoolSide& side,
       const CompressedSequence& sequence, std::int64_t head, const Buffers& buffers)
      : p_(problem),
        bindings_(bindings),
        kernels_(kernels),
        side_(side),
        sequence_(sequence),
        head_(head),
        b_(buffers),
        width_(padded(side.dim)) {}

  /// Computes compressed keys [first, first + count).
  void pool(std::int64_t first, std::int64_t count) const {
    const Tensor& pooled = bindings_[side_.pooled];
    const RowView to = pooled_rows_of(p_, pooled, sequence_);
    means(first, count, 0, side_.dim, b_.blocks);
    const float* rows = b_.blocks;
    if (p_.nsa.project) {
      load_projection();
      kernels_.matmul(count, width_, side_.dim, {b_.blocks, width_, 1}, b_.matrix, width_, b_.products, width_, false,
                      nullptr);
      rows = b_.products;
    }
    for (std::int64_t j = 0; j < count; ++j) {
      kernels_.store_row(pooled.dtype, rows + j * width_, side_.dim, to.at(first + j, head_));
    }
  }

  /// Computes the gradients of tokens [begin, end): sums, in order, over the blocks that contain a token.
  void token_gradients(std::int64_t begin, std::int64_t end) const {
    const std::int64_t length = p_.nsa.length, stride = p_.nsa.stride;
    std::fill_n(b_.tokens, (end - begin) * width_, 0.0F);
    if (p_.nsa.project) {
      load_projection();
      kernels_.transpose(width_, width_, b_.matrix, width_, b_.transposed, width_);
    }
    const std::int64_t first = begin < length ? 0 : (begin - length) / stride + 1;
    const std::int64_t last = std::min(sequence_.blocks, (end - 1) / stride + 1);
    for (std::int64_t block = first; block < last; block += kBlocks) {
      const std::int64_t count = std::min(kBlocks, last - block);
      const float* rows = load_gradients(block, count);
      for (std::int64_t j = 0; j < count; ++j) {
        const std::int64_t from = std::max(begin, (block + j) * stride);
        const std::int64_t to = std::min(end, (block + j) * stride + length);
        for (std::int64_t t = from; t < to; ++t) add(b_.tokens + (t - begin) * width_, rows + j * width_, width_);
      }
    }
    const Tensor& gradient = bindings_[side_.dtokens];
    const KeyView to = keys_of(p_, bindings_, gradient, 0, sequence_.batch);
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = b_.tokens + (t - begin) * width_;
      for (std::int64_t c = 0; c < width_; ++c) row[c] /= static_cast<float>(length);
      kernels_.store_row(gradient.dtype, row, side_.dim, to.at(t, head_));
    }
  }

  /// Adds the sequence's part of rows [begin, end) of the projection's gradient to `sum`, rows of width floats.
  void add_projection_gradient(std::int64_t begin, std::int64_t end, float* sum) const {
    const std::int64_t rows = end - begin;
    for (std::int64_t block = 0; block < sequence_.blocks; block += kBlocks) {
      const std::int64_t count = std::min(kBlocks, sequence_.blocks - block);
      means(block, count, begin, rows, b_.blocks);
      load_pooled_gradients(block, count, b_.products);
      kernels_.matmul(rows, width_, count, {b_.blocks, 1, padded(rows)}, b_.products, width_, sum, width_, true,
                      nullptr);
    }
  }

 private:
  static void add(float* sum, const float* row, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) sum[c] += row[c];
  }

  /// Computes columns [begin, begin + columns) of the means of blocks, a padded row for each block.
  void means(std::int64_t first, std::int64_t count, std::int64_t begin, std::int64_t columns, float* to) const {
    const Tensor& tokens = bindings_[side_.tokens];
    const KeyView from = keys_of(p_, bindings_, tokens, 0, sequence_.batch);
    const std::int64_t width = padded(columns);
    const std::int64_t skipped = begin * static_cast<std::int64_t>(size_of(tokens.dtype));
    for (std::int64_t j = 0; j < count; ++j, to += width) {
      std::fill_n(to, width, 0.0F);
      for (std::int64_t t = 0; t < p_.nsa.length; t += kRowsAtOnce) {
        const std::int64_t rows = std::min(kRowsAtOnce, p_.nsa.length - t);
        const std::byte* at = from.at((first + j) * p_.nsa.stride + t, head_) + skipped;
        kernels_.load_rows(tokens.dtype, at, from.row, rows, columns, 1.0F, b_.tokens, width);
        for (std::int64_t row = 0; row < rows; ++row) add(to, b_.tokens + row * width, width);
      }
      for (std::int64_t c = 0; c < width; ++c) to[c] /= static_cast<float>(p_.nsa.length);
    }
  }

  void load_pooled_gradients(std::int64_t first, std::int64_t count, float* to) const {
    const Tensor& gradient = bindings_[side_.dpooled];
    const RowView from = pooled_rows_of(p_, gradient, sequence_);
    kernels_.load_rows(gradient.dtype, from.at(first, head_), from.row, count, side_.dim, 1.0F, to, width_);
  }

  /// Returns the gradients of the means of blocks.
  const float* load_gradients(std::int64_t first, std::int64_t count) const {
    load_pooled_gradients(first, count, b_.blocks);
    if (!p_.nsa.project) return b_.blocks;
    kernels_.matmul(count, width_, side_.dim, {b_.blocks, width_, 1}, b_.transposed, width_, b_.products, width_, false,
                    nullptr);
    return b_.products;
  }

  /// Loads the projection, with zeros behind its columns and rows.
  void load_projection() const {
    const Tensor& matrix = bindings_[side_.projection];
    const auto element = static_cast<std::ptrdiff_t>(size_of(matrix.dtype));
    kernels_.load_rows(matrix.dtype, matrix.bytes() + head_ * matrix.strides[0] * element, matrix.strides[1] * element,
                       side_.dim, side_.dim, 1.0F, b_.matrix, width_);
    std::fill(b_.matrix + side_.dim * width_, b_.matrix + width_ * width_, 0.0F);
  }

  static constexpr std::int64_t kRowsAtOnce = 16;  // tokens that are loaded at once, so few that they stay in L1

  const Problem& p_;
  const Bindings& bindings_;
  const Kernels& kernels_;
  const detail::PoolSide& side_;
  const CompressedSequence& sequence_;
  std::int64_t head_;
  const Buffers& b_;
  std::int64_t width_;
};

/// What a unit of work needs.
struct Run {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  std::array<detail::PoolSide, 2> sides;
  const std::int64_t* first_blocks;

  [[nodiscard]] CompressedSequence sequence(std::int64_t batch) const {
    return find_compressed(problem, bindings, batch, first_blocks);
  }
};

/// Units are (side, batch, head, part of the sequence).
void pool_unit(const Run& run, std::int64_t index, std::int64_t parts, const Buffers& buffers) {
  const Problem& p = run.problem;
  const std::int64_t part = index % parts, head = index / parts % p.heads_kv;
  const std::int64_t batch = index / parts / p.heads_kv % p.batch;
  const detail::PoolSide& side = run.sides[static_cast<std::size_t>(index / parts / p.heads_kv / p.batch)];
  const CompressedSequence sequence = run.sequence(batch);
  const Head unit(p, run.bindings, run.kernels, side, sequence, head, buffers);
  if (p.pass == Pass::forward) {
    const std::int64_t first = part * kBlocks;
    if (first < sequence.blocks) unit.pool(first, std::min(kBlocks, sequence.blocks - first));
  } else {
    const std::int64_t begin = part * kTokens;
    if (begin < sequence.tokens) unit.token_gradients(begin, std::min(begin + kTokens, sequence.tokens));
  }
}

/// Computes rows [begin, end) of the gradient of one projection, summed over all sequences in order.
void projection_unit(const Run& run, const detail::PoolSide& side, std::int64_t head, std::int64_t begin,
                     const Buffers& buffers) {
  const std::int64_t end = std::min(begin + kMatrixRows, side.dim);
  const std::int64_t width = padded(side.dim);
  std::fill_n(buffers.matrix, (end - begin) * width, 0.0F);
  for (std::int64_t b = 0; b < run.problem.batch; ++b) {
    const CompressedSequence sequence = run.sequence(b);
    Head(run.problem, run.bindings, run.kernels, side, sequence, head, buffers)
        .add_projection_gradient(begin, end, buffers.matrix);
  }
  const Tensor& gradient = run.bindings[side.dprojection];
  for (std::int64_t row = begin; row < end; ++row) {
    float* to = gradient.as<float>() + head * gradient.strides[0] + row * gradient.strides[1];
    run.kernels.store_row(DType::fp32, buffers.matrix + (row - begin) * width, side.dim,
                          reinterpret_cast<std::byte*>(to));
  }
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& p = state.problem;
  Arena arena(resources.workspace);
  auto* first_blocks = arena.take<std::int64_t>(p.batch);
  const std::size_t bytes = thread_bytes(p);
  std::byte* memory = arena.take<std::byte>(state.target.threads, bytes);
  const std::int64_t all_blocks = find_first_blocks(p, bindings, first_blocks);
  if (const Tensor& begins = bindings[Slot::cu_blocks]) {
    auto* to = begins.as<std::int32_t>();
    for (std::int64_t b = 0; b < p.batch; ++b) to[b] = static_cast<std::int32_t>(first_blocks[b]);
    to[p.batch] = static_cast<std::int32_t>(all_blocks);
  }
  const Run run{p, bindings, kernels_for(state.target.isa), detail::pool_sides(p), first_blocks};
  const bool forward = p.pass == Pass::forward;
  const std::int64_t parts = forward ? detail::ceil_div(detail::compressed_blocks(p.nsa, p.kv.seqlen), kBlocks)
                                     : detail::ceil_div(p.kv.seqlen, kTokens);
  const std::int64_t units = 2 * p.batch * p.heads_kv * parts;
  const std::int64_t slices = detail::ceil_div(std::max(p.head_dim_qk, p.head_dim_v), kMatrixRows);
  const std::int64_t matrices = !forward && p.nsa.project ? 2 * p.heads_kv * slices : 0;
  detail::WorkQueue queue(resources.workers, units + matrices);
  resources.workers.parallel([&](int thread) {
    Arena own(memory + static_cast<std::size_t>(thread) * bytes);
    const Buffers buffers(own, p);
    queue.drain([&](std::int64_t index) {
      if (index >= matrices) return pool_unit(run, index - matrices, parts, buffers);
      const detail::PoolSide& side = run.sides[static_cast<std::size_t>(index / slices / p.heads_kv)];
      const std::int64_t begin = index % slices * kMatrixRows;
      if (begin < side.dim) projection_unit(run, side, index / slices % p.heads_kv, begin, buffers);
    });
  });
}

}  // namespace

const Implementation kNsaPool = {{"cpu.nsa_pool", DeviceType::cpu, Operation::nsa_pool, supports, plan}, run};

}  // namespace tessera::cpu
