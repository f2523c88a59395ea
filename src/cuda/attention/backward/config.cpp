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

// 16 rows a warp of the block's own side. The other side's tiles are as long as registers and two blocks a
// multiprocessor allow, or one where two do not fit at all.
void choose_tiles(BwdConfig& config, const Target& target) {
  const bool queries = config.of == Gradients::queries;
  config.warps = 4;
  config.stages = 2;
  (queries ? config.tile_q : config.tile_kv) = 16 * config.warps;
  int& stream = queries ? config.tile_kv : config.tile_q;
  const int widest = std::max(config.d, config.dv);
  config.apart = !queries && widest > 128;
  // Copies go by 16 rows, by 32 where a row is cut into panels of 32 columns.
  const int least = config.d % 64 != 0 || config.dv % 64 != 0 ? 32 : 16;
  const bool plain = !config.scale_first && !config.chunked && !config.compressed_causal && !config.dropout;
  const int most_accumulators = plain ? 168 : 144;
  for (stream = 64; stream > least; stream /= 2) {
    const int blocks = stream > 32 ? 2 : 1;
    if (config.accumulators() <= most_accumulators && blocks_that_fit(config.smem_bytes(), target) >= blocks) return;
  }
}

}  // namespace

BwdConfig bwd_config(const Problem& problem, const Target& target, Gradients of) {
  BwdConfig config;
  config.of = of;
  choose_features(config, problem);
  choose_tiles(config, target);
  return config;
}

RowValuesConfig row_values_config(const Problem& problem) {
  return {element_of(problem.q_type), padded_dim(problem.head_dim_v), problem.sink};
}

}  // namespace tessera::cuda
