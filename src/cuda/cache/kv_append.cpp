// SPDX-License-Identifier: Apache-2.0
// The row cuda.kv_append of the table: appends new tokens to a cache, with rotary embedding.
#include <algorithm>
#include <limits>

#include "base/element.h"
#include "cuda/attention/params.h"
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "shared/append.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostGrid = 65535;  // blocks in y
constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;

Support supports(const Problem& p, const Target& target, const Wishes& /*wishes*/) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  for (const DType rotated : {p.q_type, p.k_type}) {
    if (p.append.rotary == Rotary::none || !detail::is_quantised(rotated)) continue;
    return Support::no("rotates no " + std::string(to_string(rotated)) + "; want fp32, fp16 or bf16");
  }
  if (p.seqlen_q > kMost || p.kv.seqlen > kMost || p.total_q > kMost || p.kv.pages > kMost) {
    return Support::no("counts tokens and pages in 32 bits");
  }
  if (p.batch > kMostGrid) return Support::no("wants at most 65535 sequences");
  return Support::yes();
}

AppendConfig config_of(const Problem& p) {
  AppendConfig config;
  config.q = element_of(p.q_type);
  config.k = element_of(p.k_type);
  config.v = element_of(p.v_type);
  config.rotation = p.append.rotary == Rotary::half          ? Rotation::half
                    : p.append.rotary == Rotary::interleaved ? Rotation::interleaved
                                                             : Rotation::none;
  // Rows begin at multiples of 16 bytes. So must their parts of 8 elements.
  const bool wide = p.head_dim_qk % 8 == 0 && p.head_dim_v % 8 == 0 && p.append.rotary_dim % 16 == 0;
  config.width = wide ? 8 : 1;
  return config;
}

KernelSource source_of(const AppendConfig& c) {
  return {"kv_append" + words_of(c, Words::all), to_string({.file = "cuda/cache/kv_append.cuh",
                                                            .definitions = configuration_line(c),
                                                            .bounds = "config.threads()",
                                                            .parameters = {"AppendParams params"},
                                                            .call = "KvAppend<config>::run(params)"})};
}

void plan(detail::PlanState& state) {
  state.kernels = {source_of(config_of(state.problem))};
  state.choice = "kernel: " + state.kernels.front().name + "\n";
}

AppendParams params_of(const Problem& problem, const Bindings& bindings) {
  AppendParams p{};
  p.k_new = bindings[Slot::k_new].bytes();
  p.v_new = bindings[Slot::v_new].bytes();
  p.k_new_strides = row_strides(bindings[Slot::k_new]);
  p.v_new_strides = row_strides(bindings[Slot::v_new]);
  if (bindings[Slot::q]) {
    p.q = bindings[Slot::q].bytes();
    p.q_rotated = bindings[Slot::q_rotated].bytes();
    p.q_strides = row_strides(bindings[Slot::q]);
    p.q_rotated_strides = row_strides(bindings[Slot::q_rotated]);
  }
  p.kv = kv_params(problem.kv, bindings, 0);
  p.heads_q = static_cast<int>(problem.heads_q);
  p.heads_kv = static_cast<int>(problem.heads_kv);
  p.d = static_cast<int>(problem.head_dim_qk);
  p.dv = static_cast<int>(problem.head_dim_v);
  p.seqlen_q = static_cast<int>(problem.seqlen_q);
  p.total_q = static_cast<int>(problem.total_q);
  const Tensor& ends = bindings[Slot::cu_seqlens_q];
  const Tensor& used = bindings[Slot::seqused_q];
  if (ends) p.cu_seqlens_q = ends.as<int>();
  if (used) p.seqused_q = used.as<int>();
  if (problem.append.rotary == Rotary::none) return p;
  const Tensor& cosines = bindings[Slot::rotary_cos];
  const Tensor& sines = bindings[Slot::rotary_sin];
  p.cosines = cosines.bytes();
  p.sines = sines.bytes();
  p.cosine_stride = cosines.strides[0];
  p.sine_stride = sines.strides[0];
  p.positions = static_cast<int>(std::min({cosines.shape[0], sines.shape[0], kMost}));
  if (p.positions == 0) throw Error(ErrorCode::invalid_argument, "rotary_cos", "no position", "at least one");
  p.rotary_dim = static_cast<int>(problem.append.rotary_dim);
  p.cosines_fp32 = cosines.dtype == DType::fp32;
  p.sines_fp32 = sines.dtype == DType::fp32;
  return p;
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  if (problem.seqlen_q == 0 || problem.batch == 0) return;
  AppendParams params = params_of(problem, bindings);
  void* parameters[] = {&params};
  const Dim3 grid{static_cast<std::uint32_t>(problem.seqlen_q), static_cast<std::uint32_t>(problem.batch)};
  resources.kernels.front()->launch(grid, {static_cast<std::uint32_t>(AppendConfig::threads())}, 0,
                                    resources.stream.handle, parameters);
}

}  // namespace

const Implementation kKvAppend = {{"cuda.kv_append", DeviceType::cuda, Operation::kv_append, supports, plan}, run};

}  // namespace tessera::cuda
