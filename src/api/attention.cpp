// SPDX-License-Identifier: Apache-2.0
// The convenience calls: each derives a problem from its tensors, makes a plan and runs it.
#include "tessera/attention.h"

#include "tessera/error.h"

namespace tessera {
namespace {

const Tensor& require_rank_4(const Tensor& tensor, const char* name) {
  if (tensor.rank != 4) {
    throw Error(ErrorCode::invalid_argument, name, tensor.describe(), "(batch, seqlen, heads, dim)");
  }
  return tensor;
}

/// The dense problem of these tensors. Whether they agree with each other is checked with the bindings.
Problem dense_problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                      const AttentionOptions& options) {
  Problem p;
  p.batch = require_rank_4(q, "q").shape[0];
  p.seqlen_q = q.shape[1];
  p.heads_q = q.shape[2];
  p.head_dim_qk = q.shape[3];
  p.kv.seqlen = require_rank_4(k, "k").shape[1];
  p.heads_kv = k.shape[2];
  p.head_dim_v = require_rank_4(v, "v").shape[3];
  p.q_type = q.dtype;
  p.k_type = k.dtype;
  p.v_type = v.dtype;
  p.o_type = require_rank_4(o, "o").dtype;
  p.window.left = options.window_left;
  p.window.right = options.causal ? 0 : options.window_right;
  p.scale = options.scale;
  p.softcap = options.softcap;
  return p;
}

void plan_and_run(const Problem& problem, int threads, const Bindings& bindings) {
  Executor(make_plan(problem, Target::cpu(threads))).run(bindings);
}

/// One view (2, …) of two tensors of equal shape and strides. They may lie anywhere: the first stride is the difference
/// of their addresses.
Tensor as_two_parts(const Tensor& a, const Tensor& b, const char* b_name) {
  bool same = a.rank == b.rank && a.dtype == b.dtype && a.device == b.device && a.rank < Tensor::kMaxRank;
  for (std::size_t i = 0; same && i < static_cast<std::size_t>(a.rank); ++i) {
    same = a.shape[i] == b.shape[i] && (a.shape[i] <= 1 || a.strides[i] == b.strides[i]);
  }
  if (!same) {
    throw Error(ErrorCode::invalid_argument, b_name, b.describe(),
                "the dtype, shape, strides and device of the first: " + a.describe());
  }
  const auto bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.bytes())) -
                     static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(a.bytes()));
  const auto element = static_cast<std::int64_t>(size_of(a.dtype));
  if (bytes % element != 0) {
    throw Error(ErrorCode::invalid_argument, b_name, "a misaligned address", "alignment to its element");
  }
  Tensor parts = a;
  parts.rank = a.rank + 1;
  parts.shape[0] = 2;
  parts.strides[0] = bytes / element;
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.rank); ++i) {
    parts.shape[i + 1] = a.shape[i];
    parts.strides[i + 1] = a.strides[i];
  }
  return parts;
}

}  // namespace

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options,
               const Tensor& lse) {
  Problem problem = dense_problem(q, k, v, o, options);
  problem.lse = static_cast<bool>(lse);
  Bindings bindings;
  bindings[Slot::q] = q;
  bindings[Slot::k] = k;
  bindings[Slot::v] = v;
  bindings[Slot::o] = o;
  bindings[Slot::lse] = lse;
  plan_and_run(problem, options.threads, bindings);
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                        const AttentionOptions& options) {
  Problem problem = dense_problem(q, k, v, o, options);
  problem.pass = Pass::backward;
  // For narrower inputs, the caller may bind gradients in fp32 or in the types of q, k and v.
  problem.grad_fp32 = dq.dtype == DType::fp32 && dk.dtype == DType::fp32 && dv.dtype == DType::fp32;
  Bindings bindings;
  bindings[Slot::q] = q;
  bindings[Slot::k] = k;
  bindings[Slot::v] = v;
  bindings[Slot::o] = o;
  bindings[Slot::lse] = lse;
  bindings[Slot::dout] = dout;
  bindings[Slot::dq] = dq;
  bindings[Slot::dk] = dk;
  bindings[Slot::dv] = dv;
  plan_and_run(problem, options.threads, bindings);
}

void merge_states(const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b, const Tensor& lse_b, const Tensor& o,
                  const Tensor& lse) {
  Problem problem;
  problem.operation = Operation::combine;
  problem.batch = require_rank_4(o_a, "o_a").shape[0];
  problem.seqlen_q = o_a.shape[1];
  problem.kv.seqlen = problem.seqlen_q;
  problem.heads_q = o_a.shape[2];
  problem.heads_kv = problem.heads_q;
  problem.head_dim_v = o_a.shape[3];
  problem.head_dim_qk = problem.head_dim_v;
  problem.q_type = problem.k_type = problem.v_type = o_a.dtype;
  problem.o_type = require_rank_4(o, "o").dtype;
  problem.combine.parts = 2;
  problem.lse = true;
  if (lse_a.rank != 3)
    throw Error(ErrorCode::invalid_argument, "lse_a", lse_a.describe(), "fp32 (batch, heads, seqlen)");
  Bindings bindings;
  bindings[Slot::o_parts] = as_two_parts(o_a, o_b, "o_b");
  bindings[Slot::lse_parts] = as_two_parts(lse_a, lse_b, "lse_b");
  bindings[Slot::o] = o;
  bindings[Slot::lse] = lse;
  plan_and_run(problem, 0, bindings);
}

}  // namespace tessera
