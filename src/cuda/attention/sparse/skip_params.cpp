// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sparse/skip_params.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "cuda/attention/params.h"

namespace tessera::cuda {

Skip skip_of(const Problem& problem) {
  if (!problem.skip) return Skip::none;
  return problem.skip.kind == SkipRule::Kind::mass ? Skip::mass : Skip::threshold;
}

Support supports_skip(const Problem& problem) {
  if (!problem.skip) return Support::yes();
  if (problem.skip.own_lse) return Support::no("weighs tiles by the LSE of the step before; mass:own is the CPU's");
  if (std::max(problem.head_dim_qk, problem.head_dim_v) > 256) {
    return Support::no("moves skip states on for head dims up to 256");
  }
  return Support::yes();
}

Support supports_skip_tiles(const FwdConfig& c, const Problem& problem) {
  if (c.skip == Skip::none) return Support::yes();
  const bool owns =
      c.tile_q == problem.block_q || (problem.block_q >= problem.seqlen_q && c.tile_q >= problem.seqlen_q);
  if (!owns) {
    return Support::no("block_q is " + std::to_string(problem.block_q) + " and a tile has " + std::to_string(c.tile_q) +
                       " rows; skip wants query blocks of 32, 64 or 128 rows");
  }
  if (c.list_elements || problem.block_kv % c.tile_kv != 0) {
    return Support::no("block_kv is " + std::to_string(problem.block_kv) + " and a tile has " +
                       std::to_string(c.tile_kv) + " keys; skip wants blocks of whole tiles");
  }
  return Support::yes();
}

std::size_t skip_bytes(const FwdConfig& c, const Problem& problem, std::int64_t blocks) {
  if (c.products == Products::wgmma) {
    return static_cast<std::size_t>(blocks * 2 * c.warps * problem.key_blocks()) * sizeof(float);
  }
  if (c.skip != Skip::threshold) return 0;
  const std::int64_t words = detail::ceil_div(problem.key_blocks(), 32);
  return static_cast<std::size_t>(problem.batch * problem.heads_q * problem.query_blocks() * words) * sizeof(u32);
}

SkipParams skip_params(const Problem& problem, const Bindings& bindings, std::byte* workspace) {
  SkipParams p{};
  p.bits = bindings[Slot::tile_bits].as<u32>();
  if (const Tensor& codes = bindings[Slot::skip_memory]) {
    p.codes = codes.as<unsigned char>();
    std::copy_n(codes.strides.begin(), 3, p.code_strides);
    p.lse = bindings[Slot::skip_lse].as<float>();
    p.lse_strides = lse_strides(bindings[Slot::skip_lse]);
  } else {
    p.step = bindings[Slot::skip_step].as<const int>();
  }
  const Tensor& thresholds = bindings[Slot::skip_threshold];
  p.thresholds = thresholds.as<const float>();
  p.threshold_stride = thresholds.strides[0];
  if (const Tensor& bits = bindings[Slot::must_do_bits]) p.must_do = bits.as<const u32>();
  if (const Tensor& bits = bindings[Slot::must_skip_bits]) p.must_skip = bits.as<const u32>();
  p.growth = static_cast<int>(problem.skip.growth);
  p.partials = reinterpret_cast<float*>(workspace);
  p.next = reinterpret_cast<u32*>(workspace);
  p.heads = static_cast<int>(problem.heads_q);
  p.query_blocks = static_cast<int>(problem.query_blocks());
  return p;
}

}  // namespace tessera::cuda
