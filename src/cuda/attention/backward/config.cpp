// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/config.h"

#include <algorithm>

#include "cuda/driver/occupancy.h"
#include "cuda/jit/element.h"

namespace tessera::cuda {
namespace {

// Others run padded to the next.
int padded_dim(std::int64_t dim) {
  for (const int size : {32, 64, 96, 128, 192}) {
    if (dim <= size) return size;
  }
  return 256;
}

void choose_features(BwdConfig& config, const Problem& problem) {
  config.type = element_of(problem.q_type);
  config.gradient = problem.grad_fp32 ? Element::fp32 : config.type;
  config.d = padded_dim(problem.head_dim_qk);
  config.dv = padded_dim(problem.head_dim_v);
  config.segments = problem.kv2 ? 2 : 1;
  config.compressed_causal = problem.compressed_causal.has_value();
  config.chunked = problem.chunk > 0;
  // The gradient's rounding is what tells two forms of tanh apart, so that one does.
  config.softcap = problem.softcap > 0.0F ? Softcap::rational : Softcap::none;
  config.alibi = problem.alibi;
  config.sink = problem.sink;
  config.dropout = problem.dropout > 0.0F;
  config.user_mask = !problem.mask.empty();
  config.scale_first = config.softcap != Softcap::none || config.alibi || !(problem.softmax_scale() > 0.0F);
}

bool is_plain(const BwdConfig& config) {
  return !config.scale_first && !config.chunked && !config.compressed_causal && !config.dropout && !config.user_mask;
}

// 16 rows a warp of the block's own side. The other side's tiles are as long as registers and two blocks a
// multiprocessor allow, or one where two do not fit at all.
void choose_tiles_mma(BwdConfig& config, const Target& target) {
  const bool queries = config.keeps_queries();
  config.warps = 4;
  config.stages = 2;
  (queries ? config.tile_q : config.tile_kv) = 16 * config.warps;
  int& stream = queries ? config.tile_kv : config.tile_q;
  const int widest = std::max(config.d, config.dv);
  config.apart = !queries && widest > 128;
  // Copies go by 16 rows, by 32 where a row is cut into panels of 32 columns.
  const int least = config.d % 64 != 0 || config.dv % 64 != 0 ? 32 : 16;
  const int most_accumulators = is_plain(config) ? 168 : 144;
  for (stream = 64; stream > least; stream /= 2) {
    const int blocks = stream > 32 ? 2 : 1;
    if (config.accumulators() <= most_accumulators && blocks_that_fit(config.smem_bytes(), target) >= blocks) return;
  }
}

// 64 rows a warpgroup of the block's own side. The other side's tiles are as long as registers and two stages in shared
// memory allow, and then as many as fit. Beside sums, scores and their gradients the tests of masks and the draws of
// dropout need registers; by keys more than 64 rows are short of them, but for 128 whose dQ is added up.
void choose_tiles_wgmma(BwdConfig& config, const Target& target) {
  const bool queries = config.keeps_queries();
  config.warps = 8;
  (queries ? config.tile_q : config.tile_kv) = 128;
  int& stream = queries ? config.tile_kv : config.tile_q;
  const bool plain = is_plain(config);
  const bool wide = std::max(config.d, config.dv) > 128;
  config.apart = !queries && wide;
  const int most_queries = wide ? (plain ? 176 : 160) : plain ? 160 : 144;
  const int most_accumulators = queries ? most_queries : plain && config.segments == 1 ? 192 : 160;
  config.stages = 2;
  for (const int length : {128, 96, 64, 48, 32}) {
    stream = length;
    const bool is_short = length <= 64 || (queries && !config.dropout) || (config.adds_queries() && length == 128);
    if (is_short && config.accumulators() <= most_accumulators && blocks_that_fit(config.smem_bytes(), target) > 0)
      break;
  }
  for (config.stages = 4; config.stages > 2 && blocks_that_fit(config.smem_bytes(), target) == 0;) --config.stages;
}

}  // namespace

BwdConfig bwd_config(const Problem& problem, const Target& target, Products products, Gradients of) {
  BwdConfig config;
  config.of = of;
  config.products = products;
  choose_features(config, problem);
  (products == Products::wgmma ? choose_tiles_wgmma : choose_tiles_mma)(config, target);
  return config;
}

bool finds_all(const Problem& problem, Products products) {
  if (products != Products::wgmma || problem.deterministic || problem.batch_invariant) return false;
  BwdConfig config;
  choose_features(config, problem);
  return (config.d == 64 || config.d == 128) && config.dv <= 128 && is_plain(config) && config.segments == 1;
}

RowValuesConfig row_values_config(const Problem& problem, bool sums) {
  return {element_of(problem.q_type), padded_dim(problem.head_dim_v), sums ? padded_dim(problem.head_dim_qk) : 0,
          problem.sink};
}

}  // namespace tessera::cuda
