// SPDX-License-Identifier: Apache-2.0
// The row cuda.quantize of the table: conversion of rows to 8 bits, with their descales.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cuda/attention/params.h"
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "shared/quantize.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostRows = std::numeric_limits<int>::max() / 2;
constexpr std::int64_t kMostParts = 256;      // of a (batch, key head)
constexpr std::int64_t kWantedBlocks = 2048;  // of a launch: several for each multiprocessor
constexpr std::int64_t kLeastSteps = 2;       // rows() · ahead() rows that a part has at least

QuantizeConfig config_of(const Problem& p) {
  QuantizeConfig config;
  config.from = element_of(p.q_type);
  config.to = element_of(p.o_type);
  config.grain = p.quantization.grain == Grain::head    ? DescaleGrain::head
                 : p.quantization.grain == Grain::block ? DescaleGrain::block
                                                        : DescaleGrain::token;
  const auto d = static_cast<int>(p.head_dim_qk);
  config.width = d % 8 == 0 ? 8 : 1;
  const int chunks = d / config.width;
  config.lanes = static_cast<int>(std::min(std::bit_ceil(static_cast<unsigned>(chunks)), 32U));
  config.steps = divide_up(chunks, config.lanes);
  config.hadamard = p.quantization.hadamard;
  config.smooth = p.quantization.smooth;
  config.given = p.quantization.given;
  config.counts = p.quantization.counts;
  return config;
}

/// How a problem is divided into thread blocks.
struct Blocks {
  std::int64_t parts = 1;  // of a (batch, key head)
  std::int64_t part_rows = 0;
  std::int64_t a_sequence = 0;  // by block and by token

  Blocks(const Problem& p, const QuantizeConfig& c) {
    const std::int64_t rows = p.seqlen_q * p.group();
    const std::int64_t at_once = std::int64_t{c.rows()} * c.ahead();
    const std::int64_t wanted = divide_up(kWantedBlocks, std::max<std::int64_t>(p.batch * p.heads_kv, 1));
    parts = std::clamp<std::int64_t>(divide_up(rows, kLeastSteps * at_once), 1, std::min(wanted, kMostParts));
    part_rows = round_up(std::max<std::int64_t>(divide_up(rows, parts), 1), at_once);
    if (c.grain == DescaleGrain::block) a_sequence = divide_up(p.seqlen_q, p.quantization.block);
    if (c.grain == DescaleGrain::token) a_sequence = divide_up(p.seqlen_q * p.heads_q, at_once);
  }
  [[nodiscard]] std::int64_t count(const Problem& p, const QuantizeConfig& c) const {
    const std::int64_t by_part = p.batch * p.heads_kv * parts;
    if (c.phase == QuantizePhase::clear) return 1;
    if (c.phase == QuantizePhase::mean) return p.batch * p.heads_q;
    if (c.phase != QuantizePhase::round || c.grain == DescaleGrain::head) return by_part;
    return p.batch * a_sequence * (c.grain == DescaleGrain::block ? p.heads_q : 1);
  }
};

/// In the order of their launches.
constexpr QuantizePhase kPhases[] = {QuantizePhase::clear, QuantizePhase::sum, QuantizePhase::mean,
                                     QuantizePhase::largest, QuantizePhase::round};

bool has_phase(const Problem& p, QuantizePhase phase) {
  switch (phase) {
    case QuantizePhase::clear:
      return p.quantization.counts;
    case QuantizePhase::sum:
    case QuantizePhase::mean:
      return p.quantization.smooth;
    case QuantizePhase::largest:
      return p.quantization.grain == Grain::head && !p.quantization.given;
    case QuantizePhase::round:
      break;
  }
  return true;
}

/// The configuration of one launch. Fields that do not affect the launch have their defaults.
QuantizeConfig config_of(const Problem& p, QuantizePhase phase) {
  QuantizeConfig config = config_of(p);
  config.phase = phase;
  if (phase == QuantizePhase::round) return config;
  config.to = Element::e4m3;
  config.given = config.counts = false;
  config.grain = DescaleGrain::head;
  if (phase != QuantizePhase::largest) config.smooth = false;
  if (phase == QuantizePhase::clear || phase == QuantizePhase::mean) return {.phase = phase};
  return config;
}

Support supports(const Problem& p, const Target& target, const Wishes& wishes) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  if (wishes.tile_q || wishes.tile_kv || wishes.splits.value_or(1) != 1) {
    return Support::no("has no tiles and no splits");
  }
  const Blocks blocks(p, config_of(p));
  if (p.seqlen_q > kMostRows / p.heads_q || p.total_q > kMostRows || p.quantization.block > kMostRows ||
      blocks.count(p, config_of(p)) > kMostRows || p.batch * p.heads_kv * blocks.parts > kMostRows) {
    return Support::no("counts rows and blocks of threads in 32 bits");
  }
  return Support::yes();
}

KernelSource source_of(const QuantizeConfig& c) {
  return {"quantize" + words_of(c, Words::all), to_string({.file = "cuda/quantize/quantize.cuh",
                                                           .definitions = configuration_line(c),
                                                           .bounds = "config.threads()",
                                                           .parameters = {"QuantizeParams params"},
                                                           .call = "Quantize<config>::run(params)"})};
}

std::int64_t magnitudes_of(const Problem& p, const Blocks& blocks) {
  return has_phase(p, QuantizePhase::largest) ? p.batch * p.heads_kv * blocks.parts : 0;
}

void plan(detail::PlanState& state) {
  const Problem& p = state.problem;
  for (const QuantizePhase phase : kPhases) {
    if (!has_phase(p, phase)) continue;
    state.kernels.push_back(source_of(config_of(p, phase)));
    state.choice += "kernel: " + state.kernels.back().name + "\n";
  }
  const Blocks blocks(p, config_of(p));
  const std::int64_t sums = p.quantization.smooth ? p.batch * p.heads_q * blocks.parts * p.head_dim_qk : 0;
  state.workspace_bytes = static_cast<std::size_t>(magnitudes_of(p, blocks) + sums) * sizeof(float);
}

void set_descales(QuantizeParams& p, const Problem& problem, const Tensor& descales) {
  p.descales = descales.as<float>();
  p.packed_descales = problem.quantization.grain == Grain::token && problem.q_layout == Layout::varlen;
  p.descale_batch = p.packed_descales ? 0 : descales.strides[0];
  p.descale_head = descales.strides[p.packed_descales ? 0 : 1];
}

QuantizeParams params_of(const Problem& problem, const Bindings& bindings, const Blocks& blocks) {
  QuantizeParams p{};
  p.x = bindings[Slot::x].bytes();
  p.quantized = reinterpret_cast<unsigned char*>(bindings[Slot::x_quantized].bytes());
  p.x_strides = row_strides(bindings[Slot::x]);
  p.quantized_strides = row_strides(bindings[Slot::x_quantized]);
  set_descales(p, problem, bindings[Slot::x_descale]);
  if (const Tensor& mean = bindings[Slot::x_mean]) {
    p.mean = mean.as<float>();
    p.mean_batch = mean.strides[0];
    p.mean_head = mean.strides[1];
  }
  if (const Tensor& saturated = bindings[Slot::saturated]) p.saturated = saturated.as<u64>();
  p.d = static_cast<int>(problem.head_dim_qk);
  p.seqlen = static_cast<int>(problem.seqlen_q);
  p.total = static_cast<int>(problem.total_q);
  if (const Tensor& ends = bindings[Slot::cu_seqlens_q]) p.cu_seqlens = ends.as<int>();
  if (const Tensor& used = bindings[Slot::seqused_q]) p.seqused = used.as<int>();
  p.heads = Divisor(static_cast<int>(problem.heads_q));
  p.key_heads = Divisor(static_cast<int>(problem.heads_kv));
  p.group = Divisor(static_cast<int>(problem.group()));
  p.parts = Divisor(static_cast<int>(blocks.parts));
  p.part_rows = static_cast<int>(blocks.part_rows);
  p.blocks = Divisor(static_cast<int>(std::max<std::int64_t>(blocks.a_sequence, 1)));
  p.block = static_cast<int>(problem.quantization.block);
  const std::int64_t rotated = problem.head_dim_qk & -problem.head_dim_qk;
  p.rotation_scale = 1.0F / std::sqrt(static_cast<float>(rotated));
  p.rotated_chunks = static_cast<int>(rotated) / config_of(problem).width;
  p.seed = bindings.seed;
  if (const Tensor& seed = bindings[Slot::dropout_seed]) p.seed_at = seed.as<u64>();
  return p;
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Blocks blocks(problem, config_of(problem));
  QuantizeParams params = params_of(problem, bindings, blocks);
  params.magnitudes = reinterpret_cast<float*>(resources.workspace);
  params.sums = params.magnitudes + magnitudes_of(problem, blocks);
  void* parameters[] = {&params};
  const Kernel* const* kernel = resources.kernels.data();
  for (const QuantizePhase phase : kPhases) {
    if (!has_phase(problem, phase)) continue;
    const std::int64_t count = blocks.count(problem, config_of(problem, phase));
    if (count > 0) {
      (*kernel)->launch({static_cast<std::uint32_t>(count)}, {static_cast<std::uint32_t>(QuantizeConfig::threads())}, 0,
                        resources.stream.handle, parameters);
    }
    ++kernel;
  }
}

}  // namespace

const Implementation kQuantize = {{"cuda.quantize", DeviceType::cuda, Operation::quantize, supports, plan}, run};

}  // namespace tessera::cuda
