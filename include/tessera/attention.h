// SPDX-License-Identifier: Apache-2.0
// One call for the common case, on the CPU: it makes a plan, runs it and keeps nothing.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/executor.h"

namespace tessera {

struct AttentionOptions {
  bool causal = false;
  std::optional<std::int64_t> window_left{};   // inclusive; unset: unbounded
  std::optional<std::int64_t> window_right{};  // inclusive; ignored when causal
  std::optional<float> scale{};                // default 1 / sqrt(d)
  float softcap = 0.0F;
  int threads = 0;  // 0: what OpenMP would use
};

/// o = softmax(mask(scale·q·kᵀ))·v, dense layout: q (b, sq, hq, d), k (b, sk, hkv, d), v (b, sk, hkv, dv),
/// o (b, sq, hq, dv), each fp32, fp16 or bf16; lse, if bound, fp32 (b, hq, sq). Throws Error.
void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options = {},
               const Tensor& lse = {});

/// Gradients of attention(): dq, dk, dv have the shapes of q, k, v. o and lse are those the forward wrote.
void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                        const AttentionOptions& options = {});

/// Merges two partial results over disjoint keys: (o_a, lse_a) and (o_b, lse_b) into (o, lse). o_*: (b, sq, h, dv) of
/// one dtype, lse_*: fp32 (b, h, sq). o may be o_a, lse may be lse_a. Numerically the log-sum-exp merge of online
/// softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).
void merge_states(const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b, const Tensor& lse_b, const Tensor& o,
                  const Tensor& lse);

}  // namespace tessera
