// SPDX-License-Identifier: Apache-2.0
// Which problems a forward takes, and why not others.
#include <algorithm>
#include <limits>

#include "base/element.h"
#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/launch.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/masks/mask_tiles.h"
#include "cuda/attention/scores/callable_source.h"
#include "cuda/attention/sparse/skip_params.h"
#include "cuda/attention/sparse/tile_mass.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostGrid = 65535;  // most sequences, and most heads: grid y and z of other kernels
constexpr std::int64_t kMostSplits = 256;
constexpr std::int64_t kMostUnpromotedKeys = 32768;  // in products of 8 bits (tile/promoted_sums.cuh)
constexpr std::int64_t kMostCountedTiles = (std::int64_t{1} << 24) - 1;  // tiles/tile_counter.cuh

// Q and K of int8, with values of 16 bits.
Support supports_int8(const Problem& p, Products products) {
  if (products == Products::mma_by_keys) return Support::no("has no int8");
  if (p.v_type != DType::bf16 && p.v_type != DType::fp16) return Support::no("wants v in bf16 or fp16 beside int8");
  if (p.head_dim_qk % 16 != 0) return Support::no("wants head dims of 8 bits that are multiples of 16");
  if (p.quantization.block > std::numeric_limits<int>::max()) return Support::no("counts tokens of a block in 32 bits");
  return Support::yes();
}

// Keys and values of 8 bits, with queries of 16 bits or e4m3. With wgmma all three are e4m3.
Support supports_eight_bits(const Problem& p, Products products) {
  if (p.k_type == DType::int8) return supports_int8(p, products);
  if (products == Products::mma_sync) return Support::no("has no keys of 8 bits");
  const bool wgmma = products == Products::wgmma;
  if (wgmma && (p.q_type != DType::e4m3 || p.k_type != DType::e4m3 || p.v_type != DType::e4m3)) {
    return Support::no("wants q, k and v in e4m3 where one of them has 8 bits");
  }
  if (wgmma && p.head_dim_v > 128 && count_keys(p) > kMostUnpromotedKeys) {
    return Support::no("keeps 14 digits of sums over " + std::to_string(count_keys(p)) + " keys; wants at most " +
                       std::to_string(kMostUnpromotedKeys) + " above 128 columns of V");
  }
  if (wgmma && p.skip) return Support::no("moves no skip states of 8 bits on");
  if (p.q_type == DType::fp32) return Support::no("wants q in bf16, fp16 or e4m3 beside keys of 8 bits");
  if (p.quantization.grain != Grain::head) return Support::no("wants descales by head");
  if (p.quantization.smooth) return Support::no("adds no mean to keys");
  if (p.head_dim_qk % 16 != 0 || p.head_dim_v % 16 != 0) {
    return Support::no("wants head dims of 8 bits that are multiples of 16");
  }
  return Support::yes();
}

Support supports_types(const Problem& p, Products products) {
  if (detail::is_quantised(p.k_type)) return supports_eight_bits(p, products);
  if (p.q_type != p.k_type || p.q_type != p.v_type || (p.q_type != DType::bf16 && p.q_type != DType::fp16)) {
    return Support::no("wants q, k and v of one type, bf16 or fp16");
  }
  return Support::yes();
}

Support supports_features(const Problem& p, Products products) {
  if (p.pass != Pass::forward) return Support::no("does the forward only");
  if (const Support s = supports_skip(p); !s) return s;
  if (const Support s = supports_types(p, products); !s) return s;
  if (p.o_type != p.q_type && p.o_type != DType::fp32 && !detail::is_quantised(p.q_type)) {
    return Support::no("writes o in q's type or fp32");
  }
  if (const Support s = has_callables(p); !s) return s;
  return Support::yes();
}

Support supports_sizes(const Problem& problem) {
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 2;
  if (problem.seqlen_q * (problem.heads_q / problem.heads_kv) > most || problem.kv.seqlen > most ||
      problem.total_q > most || problem.kv.total > most ||
      (problem.kv2 && std::max(problem.kv2->seqlen, problem.kv2->total) > most)) {
    return Support::no("counts rows of a sequence in 32 bits");
  }
  if (problem.batch > kMostGrid || problem.heads_q / packed_heads(problem) > kMostGrid) {
    return Support::no("wants at most 65535 sequences and heads");
  }
  return gathers_mass(problem) ? supports_mass(problem) : Support::yes();
}

Support supports_splits(const Problem& problem, std::int64_t splits) {
  if (splits < 1 || splits > kMostSplits || splits * problem.batch > kMostGrid) {
    return Support::no("splits is " + std::to_string(splits) + "; want 1 to 256, at most 65535 with all sequences");
  }
  if (splits > 1 && problem.batch_invariant) {
    return Support::no("splits is " + std::to_string(splits) + "; batch_invariant keeps one part per sequence");
  }
  if (splits > 1 && problem.residual) {
    return Support::no("splits is " + std::to_string(splits) + "; the residual of o is kept by blocks of all keys");
  }
  if (splits > 1 && problem.skip) {
    return Support::no("splits is " + std::to_string(splits) + "; a skip state's masses need whole rows");
  }
  return Support::yes();
}

// Whether the number of row tiles and the shared memory of a configuration are within bounds.
Support supports_launch(const FwdConfig& config, const Problem& problem, const Target& target, std::int64_t splits) {
  const bool counted = config.products == Products::wgmma;
  const std::int64_t most_tiles = counted ? kMostCountedTiles : std::numeric_limits<int>::max();
  if (const std::int64_t tiles = count_blocks(config, problem, splits); tiles > most_tiles) {
    return Support::no("needs " + std::to_string(tiles) + " row tiles; want at most " + std::to_string(most_tiles));
  }
  const int bytes = config.smem_bytes();
  if (bytes > target.shared_memory) {
    return Support::no("needs " + std::to_string(bytes) + " bytes of shared memory; the target has " +
                       std::to_string(target.shared_memory));
  }
  return Support::yes();
}

}  // namespace

Support supports_forward(const Problem& given, const Target& target, const Wishes& wishes, Products products,
                         ConfigSupport exists) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  if (const Support s = supports_features(given, products); !s) return s;
  const Problem problem = products == Products::mma_by_keys ? given : with_mask_list(given, wishes);
  if (const Support s = supports_sizes(problem); !s) return s;
  const std::int64_t splits = choose_splits(problem, target, wishes, products);
  if (const Support s = supports_splits(problem, splits); !s) return s;
  const FwdConfig config = fwd_config(problem, target, splits, wishes, products);
  if (const Support s = supports_skip_tiles(config, problem); !s) return s;
  if (const Support s = exists(config, problem, target, wishes); !s) return s;
  if (const Support s = supports_launch(config, problem, target, splits); !s) return s;
  if (given.list && (wishes.tile_q || wishes.tile_kv || wishes.warps)) {
    return Support::no("tile_q, tile_kv and warps cannot be wished for beside a list: its blocks decide them");
  }
  return Support::yes();
}

}  // namespace tessera::cuda
