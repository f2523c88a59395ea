// SPDX-License-Identifier: Apache-2.0
// What tests of the backward's host side share: bindings of a problem, and the parameters of the last launch.
#pragma once

#include <cstring>

#include "launch/launch.h"
#include "shared/backward.h"

namespace tessera {

class Backward : public Launch {
 protected:
  void SetUp() override {
    Launch::SetUp();
    gpu_.parameter_bytes = sizeof(cuda::BwdParams);
  }

  Bindings dense(const Problem& p) {
    const DType gradient = p.grad_fp32 ? DType::fp32 : p.q_type;
    Bindings bindings = Launch::dense(p);
    bindings[Slot::lse] = tensor(DType::fp32, {p.batch, p.heads_q, p.seqlen_q});
    bindings[Slot::dout] = tensor(p.o_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
    bindings[Slot::dq] = tensor(gradient, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_qk});
    bindings[Slot::dk] = tensor(gradient, {p.batch, p.kv.seqlen, p.heads_kv, p.head_dim_qk});
    bindings[Slot::dv] = tensor(gradient, {p.batch, p.kv.seqlen, p.heads_kv, p.head_dim_v});
    if (p.kv2) {
      const std::int64_t keys = p.kv2->seqlen;
      bindings[Slot::k2] = tensor(p.k_type, {p.batch, keys, p.heads_kv, p.head_dim_qk});
      bindings[Slot::v2] = tensor(p.v_type, {p.batch, keys, p.heads_kv, p.head_dim_v});
      bindings[Slot::dk2] = tensor(gradient, {p.batch, keys, p.heads_kv, p.head_dim_qk});
      bindings[Slot::dv2] = tensor(gradient, {p.batch, keys, p.heads_kv, p.head_dim_v});
    }
    if (p.dlse) bindings[Slot::dlse] = tensor(DType::fp32, {p.batch, p.heads_q, p.seqlen_q});
    if (p.sink) {
      bindings[Slot::sink] = tensor(DType::fp32, {p.heads_q});
      bindings[Slot::dsink] = tensor(DType::fp32, {p.heads_q});
    }
    return bindings;
  }

  static cuda::BwdParams params() {
    cuda::BwdParams p{};
    std::memcpy(static_cast<void*>(&p), gpu_.last.parameters.data(), sizeof(p));
    return p;
  }
};

}  // namespace tessera
