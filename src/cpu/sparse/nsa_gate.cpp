// SPDX-License-Identifier: Apache-2.0
// The operation `nsa_gate`: O = Σ g_x · O_x over the branches of native sparse attention, and its gradient
// (docs/nsa.md; Yuan et al. 2025, equation 5).
#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/sequence.h"
#include "operations/nsa.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kRows = 64;  // rows of a head in a unit of work
constexpr std::int64_t kBranches = detail::kNsaBranches;
constexpr std::int64_t kColumns = padded(kBranches);  // of products with gate weights

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  return has_kernels_of({problem.q_type, problem.v_type, problem.o_type});
}

/// A thread's memory.
struct Buffers {
  Buffers(Arena& arena, const Problem& problem) {
    const std::int64_t width = padded(problem.head_dim_qk), width_v = padded(problem.head_dim_v);
    sums = arena.take<float>(width_v);
    branches = arena.take<float>(kBranches, width_v);
    gates = arena.take<float>(kRows, kColumns);
    if (problem.nsa.gate != GateKind::sigmoid) return;
    q = arena.take<float>(kRows, width);
    weight = arena.take<float>(kColumns, width);
    transposed = arena.take<float>(width, kColumns);
  }
  float *sums, *branches;  // rows of O
  float* gates;            // (rows, columns); the backward replaces them by their gradients
  float *q = nullptr, *weight = nullptr, *transposed = nullptr;  // weight: a row for each branch, then zeros
};

std::size_t thread_bytes(const Problem& problem) {
  Arena counter;
  const Buffers buffers(counter, problem);
  return counter.used();
}

bool keeps_logit_gradients(const Problem& problem) {
  return problem.pass == Pass::backward && problem.nsa.gate == GateKind::sigmoid;
}

std::int64_t all_rows(const Problem& problem) {
  return problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
}

/// The workspace of a run.
struct Workspace {
  Workspace(Arena& arena, const detail::PlanState& state) {
    const Problem& p = state.problem;
    if (keeps_logit_gradients(p)) logits = arena.take<float>(all_rows(p), p.heads_q, kBranches);
    threads = arena.take<std::byte>(state.target.threads, thread_bytes(p));
  }
  float* logits = nullptr;  // gradients of the sigmoids' arguments: (rows, heads, branches)
  std::byte* threads;
};

void plan(detail::PlanState& state) {
  Arena arena;
  const Workspace workspace(arena, state);
  state.workspace_bytes = arena.used();
}

/// One head of consecutive rows of one sequence; packed tokens are one sequence.
class Rows {
 public:
  Rows(const Problem& problem, const Bindings& bindings, const Kernels& kernels, const Sequence& sequence,
       std::int64_t head, std::int64_t first, std::int64_t count, const Buffers& buffers)
      : p_(problem),
        bindings_(bindings),
        kernels_(kernels),
        sequence_(sequence),
        head_(head),
        first_(first),
        count_(count),
        b_(buffers),
        width_(padded(problem.head_dim_qk)),
        width_v_(padded(problem.head_dim_v)) {
    for (std::int64_t x = 0; x < kBranches; ++x) {
      parts_[x] = rows_of(p_, branch_of(bindings_[Slot::o_parts], x), sequence_);
      if (bindings_[Slot::do_parts]) gradients_[x] = rows_of(p_, branch_of(bindings_[Slot::do_parts], x), sequence_);
    }
  }

  void forward() const {
    find_gates();
    const RowView o = rows_of(p_, bindings_[Slot::o], sequence_);
    for (std::int64_t i = 0; i < count_; ++i) {
      const float* gates = b_.gates + i * kColumns;
      for (std::int64_t x = 0; x < kBranches; ++x) {
        float* row = b_.branches + x * width_v_;
        if (gates[x] == 0.0F) {  // the output of a branch whose gate is 0 may be anything
          std::fill_n(row, width_v_, 0.0F);
        } else {
          kernels_.load_row(p_.v_type, parts_[x].at(first_ + i, head_), p_.head_dim_v, 1.0F, row, width_v_);
        }
      }
      kernels_.matmul(1, width_v_, kBranches, {gates, kColumns, 1}, b_.branches, width_v_, b_.sums, width_v_, false,
                      nullptr);
      kernels_.store_row(p_.o_type, b_.sums, p_.head_dim_v, o.at(first_ + i, head_));
    }
  }

  /// `logits`: the gradients of the logits, from row 0 of the sequence on.
  void backward(float* logits) const {
    find_gates();
    const RowView dout = rows_of(p_, bindings_[Slot::dout], sequence_);
    for (std::int64_t i = 0; i < count_; ++i) {
      float* gates = b_.gates + i * kColumns;
      for (std::int64_t x = 0; x < kBranches; ++x) {
        kernels_.load_row(p_.o_type, dout.at(first_ + i, head_), p_.head_dim_v, 1.0F, b_.sums, width_v_);
        kernels_.load_row(p_.v_type, parts_[x].at(first_ + i, head_), p_.head_dim_v, 1.0F, b_.branches, width_v_);
        float gradient = 0.0F;
        kernels_.dot_rows(1, width_v_, b_.sums, b_.branches, width_v_, &gradient);
        for (std::int64_t c = 0; c < width_v_; ++c) b_.sums[c] *= gates[x];
        kernels_.store_row(p_.v_type, b_.sums, p_.head_dim_v, gradients_[x].at(first_ + i, head_));
        // The gate is not needed any more: its gradient takes its place.
        gates[x] = p_.nsa.gate == GateKind::sigmoid ? gradient * gates[x] * (1.0F - gates[x]) : gradient;
      }
    }
    if (p_.nsa.gate == GateKind::given) return store_gate_gradients();
    if (p_.nsa.gate != GateKind::sigmoid) return;
    const RowView dq = rows_of(p_, bindings_[Slot::dq], sequence_);
    kernels_.matmul(count_, width_, kBranches, {b_.gates, kColumns, 1}, b_.weight, width_, b_.q, width_, false,
                    nullptr);
    for (std::int64_t i = 0; i < count_; ++i) {
      kernels_.store_row(p_.q_type, b_.q + i * width_, p_.head_dim_qk, dq.at(first_ + i, head_));
      std::copy_n(b_.gates + i * kColumns, kBranches, logits + ((first_ + i) * p_.heads_q + head_) * kBranches);
    }
  }

 private:
  static Tensor branch_of(const Tensor& parts, std::int64_t branch) {
    Tensor one = parts;
    one.rank = parts.rank - 1;
    for (std::size_t i = 0; i < static_cast<std::size_t>(one.rank); ++i) {
      one.shape[i] = parts.shape[i + 1];
      one.strides[i] = parts.strides[i + 1];
    }
    one.byte_offset += branch * parts.strides[0] * static_cast<std::int64_t>(size_of(parts.dtype));
    return one;
  }

  void find_gates() const {
    if (p_.nsa.gate == GateKind::mean) {
      std::fill_n(b_.gates, count_ * kColumns, 1.0F / kBranches);
      return;
    }
    if (p_.nsa.gate == GateKind::given) {
      const RowView given = rows_of(p_, bindings_[Slot::gates], sequence_);
      for (std::int64_t i = 0; i < count_; ++i) {
        std::copy_n(reinterpret_cast<const float*>(given.at(first_ + i, head_)), kBranches, b_.gates + i * kColumns);
      }
      return;
    }
    const Tensor& weight = bindings_[Slot::gate_weight];
    const auto element = static_cast<std::ptrdiff_t>(size_of(weight.dtype));
    std::fill_n(b_.weight, kColumns * width_, 0.0F);
    kernels_.load_rows(weight.dtype, weight.bytes() + head_ * weight.strides[0] * element, weight.strides[1] * element,
                       kBranches, p_.head_dim_qk, 1.0F, b_.weight, width_);
    kernels_.transpose(kColumns, width_, b_.weight, width_, b_.transposed, kColumns);
    const RowView q = rows_of(p_, bindings_[Slot::q], sequence_);
    kernels_.load_rows(p_.q_type, q.at(first_, head_), q.row, count_, p_.head_dim_qk, 1.0F, b_.q, width_);
    kernels_.matmul(count_, kColumns, p_.head_dim_qk, {b_.q, width_, 1}, b_.transposed, kColumns, b_.gates, kColumns,
                    false, nullptr);
    for (std::int64_t i = 0; i < count_ * kColumns; ++i) {
      if (i % kColumns < kBranches) b_.gates[i] = 1.0F / (1.0F + std::exp(-b_.gates[i]));
    }
  }

  void store_gate_gradients() const {
    const RowView to = rows_of(p_, bindings_[Slot::dgates], sequence_);
    for (std::int64_t i = 0; i < count_; ++i) {
      std::copy_n(b_.gates + i * kColumns, kBranches, reinterpret_cast<float*>(to.at(first_ + i, head_)));
    }
  }

  const Problem& p_;
  const Bindings& bindings_;
  const Kernels& kernels_;
  const Sequence& sequence_;
  std::int64_t head_, first_, count_;
  const Buffers& b_;
  std::int64_t width_, width_v_;
  RowView parts_[kBranches], gradients_[kBranches];
};

/// The sequences as Rows sees them: packed tokens are one, which ends where the last sequence does.
struct Batches {
  Batches(const Problem& problem, const Bindings& bindings)
      : packed(problem.q_layout == Layout::varlen),
        count(packed ? 1 : problem.batch),
        rows(packed ? bindings[Slot::cu_seqlens_q].as<const std::int32_t>()[problem.batch] : problem.seqlen_q) {}
  bool packed;
  std::int64_t count, rows;
};

/// Computes the gradient of a head's gate weights: sums over the rows of all sequences, in order.
void weight_gradient(const Problem& p, const Bindings& bindings, const Kernels& kernels, const Batches& batches,
                     std::int64_t head, const float* logits, const Buffers& buffers) {
  const std::int64_t width = padded(p.head_dim_qk);
  std::fill_n(buffers.weight, kColumns * width, 0.0F);
  for (std::int64_t b = 0; b < batches.count; ++b) {
    Sequence sequence;
    sequence.batch = b;
    const RowView q = rows_of(p, bindings[Slot::q], sequence);
    for (std::int64_t first = 0; first < batches.rows; first += kRows) {
      const std::int64_t count = std::min(kRows, batches.rows - first);
      kernels.load_rows(p.q_type, q.at(first, head), q.row, count, p.head_dim_qk, 1.0F, buffers.q, width);
      const float* e = logits + ((b * batches.rows + first) * p.heads_q + head) * kBranches;
      kernels.matmul(kBranches, width, count, {e, 1, p.heads_q * kBranches}, buffers.q, width, buffers.weight, width,
                     true, nullptr);
    }
  }
  const Tensor& gradient = bindings[Slot::dgate_weight];
  for (std::int64_t x = 0; x < kBranches; ++x) {
    float* to = gradient.as<float>() + head * gradient.strides[0] + x * gradient.strides[1];
    kernels.store_row(DType::fp32, buffers.weight + x * width, p.head_dim_qk, reinterpret_cast<std::byte*>(to));
  }
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& p = state.problem;
  const Kernels& kernels = kernels_for(state.target.isa);
  Arena arena(resources.workspace);
  const Workspace workspace(arena, state);
  const std::size_t bytes = thread_bytes(p);
  const Batches batches(p, bindings);
  const std::int64_t parts = detail::ceil_div(batches.rows, kRows);
  const auto each = [&](std::int64_t count, const auto& task) {
    detail::WorkQueue queue(resources.workers, count);
    resources.workers.parallel([&](int thread) {
      Arena own(workspace.threads + static_cast<std::size_t>(thread) * bytes);
      const Buffers buffers(own, p);
      queue.drain([&](std::int64_t index) { task(index, buffers); });
    });
  };
  each(batches.count * parts * p.heads_q, [&](std::int64_t index, const Buffers& buffers) {
    Sequence sequence;
    sequence.batch = index / p.heads_q / parts;
    const std::int64_t first = index / p.heads_q % parts * kRows;
    const Rows rows(p, bindings, kernels, sequence, index % p.heads_q, first, std::min(kRows, batches.rows - first),
                    buffers);
    if (p.pass == Pass::forward) return rows.forward();
    rows.backward(workspace.logits + sequence.batch * batches.rows * p.heads_q * kBranches);
  });
  if (!keeps_logit_gradients(p)) return;
  each(p.heads_q, [&](std::int64_t head, const Buffers& buffers) {
    weight_gradient(p, bindings, kernels, batches, head, workspace.logits, buffers);
  });
}

}  // namespace

const Implementation kNsaGate = {{"cpu.nsa_gate", DeviceType::cpu, Operation::nsa_gate, supports, plan}, run};

}  // namespace tessera::cpu
