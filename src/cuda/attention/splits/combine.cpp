// SPDX-License-Identifier: Apache-2.0
// The implementation cuda.combine, and the launch of its kernel, which forwards with splits use, too.
#include "cuda/attention/splits/combine.h"

#include <limits>

#include "cuda/attention/params.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostGrid = 65535;  // blocks in y

CombineConfig config_of(const Problem& p) { return {element_of(p.q_type), element_of(p.o_type)}; }

// Varlen partials are merged token by token, so that the tensor counts as one sequence.
std::int64_t sequences(const Problem& p) { return p.q_layout == Layout::varlen ? 1 : p.batch; }
std::int64_t rows(const Problem& p) { return p.q_layout == Layout::varlen ? p.total_q : p.seqlen_q; }

Support supports(const Problem& p, const Target& target, const Wishes& /*wishes*/) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  for (const DType dtype : {p.q_type, p.o_type}) {
    if (!is_float(dtype)) return Support::no("has no " + std::string(to_string(dtype)) + "; want fp32, fp16 or bf16");
  }
  if (p.head_dim_v % 8 != 0) return Support::no("wants a head dim that is a multiple of 8");
  if (rows(p) * p.heads_q > std::numeric_limits<int>::max() / 2 || p.combine.parts > std::numeric_limits<int>::max()) {
    return Support::no("counts rows of a sequence in 32 bits");
  }
  if (sequences(p) > kMostGrid) return Support::no("wants at most 65535 sequences");
  return Support::yes();
}

void plan(detail::PlanState& state) {
  state.kernels = {source_of(config_of(state.problem))};
  state.choice = "kernel: " + state.kernels.front().name + "\n";
}

// Returns the first part; the leading dimension of the tensor numbers the parts.
Tensor first_part(Tensor parts) {
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(parts.rank); ++i) {
    parts.shape[i] = parts.shape[i + 1];
    parts.strides[i] = parts.strides[i + 1];
  }
  --parts.rank;
  return parts;
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Tensor& o_parts = bindings[Slot::o_parts];
  const Tensor& lse_parts = bindings[Slot::lse_parts];
  CombineParams p{};
  p.o_parts = o_parts.bytes();
  p.lse_parts = lse_parts.as<float>();
  p.o = bindings[Slot::o].bytes();
  if (bindings[Slot::lse]) p.lse = bindings[Slot::lse].as<float>();
  if (bindings[Slot::sink]) {
    p.sinks = bindings[Slot::sink].as<float>();
    p.sinks_stride = bindings[Slot::sink].strides[0];
  }
  p.o_part = o_parts.strides[0];
  p.lse_part = lse_parts.strides[0];
  p.o_parts_strides = row_strides(first_part(o_parts));
  p.lse_parts_strides = lse_strides(first_part(lse_parts));
  p.o_strides = row_strides(bindings[Slot::o]);
  p.lse_strides = lse_strides(bindings[Slot::lse]);
  p.parts = static_cast<int>(problem.combine.parts);
  p.heads = Divisor(static_cast<int>(problem.heads_q));
  p.dv = static_cast<int>(problem.head_dim_v);
  p.seqlen_q = static_cast<int>(rows(problem));
  launch_combine(*resources.kernels.front(), p, sequences(problem), rows(problem), resources.stream);
}

}  // namespace

KernelSource source_of(const CombineConfig& c) {
  return {"combine" + words_of(c, Words::all), to_string({.file = "cuda/attention/splits/combine.cuh",
                                                          .definitions = configuration_line(c),
                                                          .bounds = "config.threads(), 4",
                                                          .parameters = {"CombineParams params"},
                                                          .call = "Combine<config>::run(params)"})};
}

void launch_combine(const Kernel& kernel, const CombineParams& params, std::int64_t batch, std::int64_t rows,
                    Stream stream) {
  const std::int64_t work = rows * params.heads.value;
  if (work == 0 || batch == 0) return;
  constexpr std::int64_t a_block = CombineConfig::rows_a_block();
  const Dim3 grid{static_cast<std::uint32_t>((work + a_block - 1) / a_block), static_cast<std::uint32_t>(batch)};
  CombineParams copy = params;
  void* parameters[] = {&copy};
  kernel.launch(grid, {static_cast<std::uint32_t>(CombineConfig::threads())}, 0, stream.handle, parameters,
                Begins::early);
}

const Implementation kCombine = {{"cuda.combine", DeviceType::cuda, Operation::combine, supports, plan}, run};

}  // namespace tessera::cuda
