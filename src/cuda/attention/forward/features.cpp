// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/features.h"

#include <algorithm>

#include "base/element.h"
#include "cuda/attention/params.h"
#include "cuda/attention/scores/callable_source.h"
#include "cuda/attention/sparse/skip_params.h"
#include "cuda/jit/element.h"

namespace tessera::cuda {
namespace {

Source source_of(const Problem& problem) {
  if (problem.kv2 && is_paged(problem.kv) != is_paged(*problem.kv2)) return Source::mixed;
  return is_paged(problem.kv) ? Source::paged : Source::strided;
}

// Head dims that have configurations. Others are padded to the next of them.
int padded_dim(std::int64_t dim) {
  for (const int size : {32, 64, 96, 128, 192, 256, 384}) {
    if (dim <= size) return size;
  }
  return 512;
}

// A warp's registers cannot hold 16 rows of more than 256 columns of O, so two blocks share the columns.
void choose_dims(FwdConfig& config, const Problem& problem) {
  config.d = padded_dim(problem.head_dim_qk);
  int dv = padded_dim(problem.head_dim_v);
  if (config.has_descales()) config.d = round_up(config.d, 64);  // panels have at least 64 bytes
  if (config.eight_bits) dv = round_up(dv, 64);
  config.dv_parts = dv > 256 ? 2 : 1;
  config.dv = dv / config.dv_parts;
  // With panels of 128 bytes, tiles are copied 16 rows at a time.
  if (config.d > 256) config.dv = round_up(config.dv, 128 / bytes_of(config.type));
}

// If scale · s − origin is one FMA, the result is off by the rounding of the origin, which is scale · max. Beyond 2^30
// that is more than the exponents of P have room for. So large scales are not fused. Large q and k with a small scale
// remain a limitation (docs/semantics.md).
constexpr float kLargestFusedScale = 1024.0F;
bool is_fused(float scale) { return scale > 0.0F && scale <= kLargestFusedScale; }

// Linear scores divide slopes by the scale, which must be at least this.
constexpr float kLeastScaleOfSlopes = 0x1p-40F;

// The exponential form is off by a rounding of the cap. For these caps that is less than the rounding of probabilities,
// unless a callable multiplies the score.
constexpr float kLeastExponentialCap = 1.0F / 1024;
constexpr float kLargestExponentialCap = 64.0F;

Softcap softcap_of(const Problem& problem) {
  if (!(problem.softcap > 0.0F)) return Softcap::none;
  const bool moderate = problem.softcap >= kLeastExponentialCap && problem.softcap <= kLargestExponentialCap;
  return moderate && problem.score.empty() ? Softcap::exponential : Softcap::rational;
}

}  // namespace

// Heads are not packed with dropout, whose draws are cheapest for rows at consecutive positions, nor with a list that
// differs between query heads.
std::int64_t packed_heads(const Problem& problem) {
  const bool apart = problem.dropout > 0.0F || (problem.list && problem.list.heads == TileList::Heads::q);
  return apart ? 1 : problem.group();
}

std::int64_t count_keys(const Problem& problem) { return problem.kv.seqlen + (problem.kv2 ? problem.kv2->seqlen : 0); }

FwdConfig features_of(const Problem& problem, std::int64_t splits) {
  FwdConfig config;
  config.widens_queries = detail::is_quantised(problem.q_type);
  const DType wide = problem.o_type == DType::bf16 ? DType::bf16 : DType::fp16;
  config.int8_scores = problem.k_type == DType::int8;
  if (config.int8_scores) config.widens_queries = false;
  config.type = element_of(config.int8_scores ? problem.v_type : config.widens_queries ? wide : problem.q_type);
  config.output = splits > 1 ? Element::fp32 : element_of(problem.o_type);
  config.eight_bits = detail::is_quantised(problem.k_type) && !config.int8_scores;
  if (config.eight_bits) {
    config.key = element_of(problem.k_type);
    config.value = element_of(problem.v_type);
  }
  config.descales_keys = config.int8_scores && problem.quantization.grain != Grain::head;
  config.smooth = config.int8_scores && problem.quantization.smooth;
  choose_dims(config, problem);
  config.source = source_of(problem);
  config.segments = problem.kv2 ? 2 : 1;
  config.tiles = problem.list ? Tiles::list : Tiles::range;
  config.trusts =
      problem.metadata == Metadata::trust && (config.source != Source::strided || config.tiles == Tiles::list);
  config.compressed_causal = problem.compressed_causal.has_value();
  config.chunked = problem.chunk > 0;
  config.softcap = softcap_of(problem);
  config.alibi = problem.alibi;
  config.dropout = problem.dropout > 0.0F;
  config.rounded_sums = problem.o_type == DType::fp32 || problem.residual;  // not for partial results of 16-bit outputs
  config.residual = problem.residual;
  config.user_score = !problem.score.empty();
  config.user_mask = !problem.mask.empty();
  config.skip = skip_of(problem);
  config.scale_first =
      config.softcap != Softcap::none || config.alibi || config.user_score || !is_fused(problem.softmax_scale());
  return config;
}

void choose_linear_score(FwdConfig& config, const Problem& problem) {
  const float scale = problem.softmax_scale();
  const bool is_alibi = config.alibi && !config.user_score && problem.window.right && *problem.window.right <= 0;
  if (!is_alibi && (config.alibi || !has_linear_score(problem))) return;
  if (config.softcap != Softcap::none || config.skip != Skip::none || config.has_descales()) return;
  if (config.segments > 1) return;  // distances are counted from one; the other may lie far from it
  if (!is_fused(scale) || scale < kLeastScaleOfSlopes) return;
  config.linear_score = true;
  config.scale_first = false;
}

bool walks_plainly(const FwdConfig& config) {
  return config.source == Source::strided && config.tiles == Tiles::range && config.segments == 1 &&
         (config.output == config.type || config.eight_bits) && !config.compressed_causal && !config.chunked &&
         !config.dropout && !config.user_score && !config.user_mask;
}

bool is_plain(const FwdConfig& config) { return walks_plainly(config) && !config.scale_first; }

}  // namespace tessera::cuda
