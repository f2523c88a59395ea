// SPDX-License-Identifier: Apache-2.0
// The row cuda.linear_decode of the table: decode steps of linear attention on a pool of states.
#include <algorithm>
#include <limits>

#include "cuda/attention/params.h"
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "shared/linear.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostGrid = 65535;  // blocks in y and z
constexpr int kMostLoads = 16;             // 16-byte loads of a thread: 64 registers for an fp32 state, 128 for bf16
// Bytes of the state that a block takes. With rows of k and no ring, the number of elements is fixed instead: 64
// columns of 128 rows.
constexpr std::int64_t kBlockBytes = 16 * 1024, kOneTokenBytes = 4 * 1024;
constexpr std::int64_t kElementsOfK = 8 * 1024;

bool is_one_token(const Problem& p) {
  return p.seqlen_q == 1 && p.linear.ring == 0 && p.linear.state_layout == StateLayout::vk;
}

/// Parts of head_dim_qk, each computed by blocks of its own.
std::int64_t parts_of(const Wishes& wishes) { return wishes.splits.value_or(1); }

/// Elements of o.
std::int64_t outputs(const Problem& p) { return p.batch * p.seqlen_q * p.heads_q * p.head_dim_v; }

/// The tile that was measured fastest (docs/experiments/linear-decode.md). `d`: the dims of k that a block takes. With
/// rows of k a tile is at least 128 bytes wide, a line of memory. If there are fewer than two blocks per
/// multiprocessor, tiles are made smaller.
int default_tile(const Problem& p, std::int64_t d, const Target& target) {
  const auto element = static_cast<std::int64_t>(size_of(p.linear.state_type));
  const bool rows_of_k = p.linear.state_layout == StateLayout::kv;
  const std::int64_t least = rows_of_k ? 128 / element : 8;
  const std::int64_t bytes = is_one_token(p)                   ? kOneTokenBytes
                             : rows_of_k && p.linear.ring == 0 ? kElementsOfK * element
                                                               : kBlockBytes;
  std::int64_t tile = std::max(bytes / (d * element), least);
  while (p.head_dim_v % tile != 0 && tile > 8) tile /= 2;
  const auto blocks = [&] { return p.batch * p.heads_q * p.head_dim_v / tile; };
  while (target.multiprocessors > 0 && blocks() < 2 * target.multiprocessors &&
         tile / 2 >= std::max(least, std::int64_t{8})) {
    tile /= 2;
  }
  return static_cast<int>(tile);
}

/// The configuration of a problem whose types and sizes have kernels; wishes that do not fit are not refused here.
LinearConfig config_of(const Problem& p, const Target& target, const Wishes& wishes) {
  LinearConfig config;
  config.q = element_of(p.q_type);
  config.k = element_of(p.k_type);
  config.v = element_of(p.v_type);
  config.o = element_of(p.o_type);
  config.state = element_of(p.linear.state_type);
  config.rows = p.linear.state_layout == StateLayout::vk ? StateRows::v : StateRows::k;
  config.stochastic = p.linear.rounding == Rounding::stochastic;
  config.one_token = is_one_token(p);
  config.parts = static_cast<int>(parts_of(wishes));
  config.d = static_cast<int>(p.head_dim_qk) / config.parts;
  if (config.parts > 1) config.o = Element::fp32;
  config.tile = wishes.tile_kv ? static_cast<int>(*wishes.tile_kv) : default_tile(p, config.d, target);
  config.warps = static_cast<int>(wishes.warps.value_or(4));
  if (!wishes.warps) {
    const int most = p.linear.ring == 0 && config.state == Element::bf16 ? 4 : 8;  // loads of a thread with rows of k
    while (config.warps < 8 && config.rows == StateRows::k && config.loads() > most) config.warps *= 2;
    while (config.warps > 1 && !config.is_even()) config.warps /= 2;
  }
  return config;
}

std::size_t shared_bytes_of(const LinearConfig& c, const Problem& p) {
  const auto tokens = static_cast<int>(p.seqlen_q);
  const int bytes =
      p.linear.ring > 0 ? c.ring_smem_bytes(tokens, static_cast<int>(p.linear.ring)) : c.smem_bytes(tokens);
  return static_cast<std::size_t>(bytes);
}

Support supports_sizes(const Problem& p) {
  if (p.head_dim_qk != 64 && p.head_dim_qk != 128 && p.head_dim_qk != 256) {
    return Support::no("head_dim_qk " + std::to_string(p.head_dim_qk) + "; want 64, 128 or 256");
  }
  if (p.head_dim_v % 32 != 0) return Support::no("head_dim_v is to be a multiple of 32");
  if (p.batch > kMostGrid || p.heads_q > kMostGrid) return Support::no("wants at most 65535 sequences and heads");
  return Support::yes();
}

Support supports_parts(const Problem& p, std::int64_t parts) {
  if (parts != 1 && parts != 2) return Support::no("splits is " + std::to_string(parts) + "; want 1 or 2");
  if (parts == 1) return Support::yes();
  if (p.linear.ring > 0) return Support::no("splits is 2; want 1 beside a ring");
  if (p.linear.rounding == Rounding::stochastic)
    return Support::no("splits is 2; want 1 where states are rounded by chance");
  if (outputs(p) > std::numeric_limits<int>::max()) {
    return Support::no("splits is 2; want 1 for " + std::to_string(outputs(p)) + " outputs");
  }
  return Support::yes();
}

Support supports(const Problem& p, const Target& target, const Wishes& wishes) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  for (const DType dtype : {p.q_type, p.k_type, p.v_type}) {
    if (!is_float(dtype)) return Support::no("has no " + std::string(to_string(dtype)) + "; want fp32, fp16 or bf16");
  }
  if (const Support sizes = supports_sizes(p); !sizes) return sizes;
  if (wishes.tile_q || wishes.stages || !wishes.loader.empty()) {
    return Support::no("takes the wishes tile_kv (of head_dim_v, a block), warps and splits (of head_dim_qk) only");
  }
  if (const Support parts = supports_parts(p, parts_of(wishes)); !parts) return parts;
  if (wishes.tile_kv && (*wishes.tile_kv % 8 != 0 || *wishes.tile_kv > p.head_dim_v)) {
    return Support::no("tile_kv is a multiple of 8 that divides head_dim_v");
  }
  const std::int64_t warps = wishes.warps.value_or(4);
  if (warps != 1 && warps != 2 && warps != 4 && warps != 8) return Support::no("warps are 1, 2, 4 or 8");
  const LinearConfig config = config_of(p, target, wishes);
  const bool fits =
      config.tile % 8 == 0 && p.head_dim_v % config.tile == 0 && config.tile * size_of(p.linear.state_type) >= 16;
  if (!fits || !config.is_even() || config.loads() > kMostLoads) {
    return Support::no("tile_kv=" + std::to_string(config.tile) + " with warps=" + std::to_string(config.warps) +
                       " does not deal a head's state evenly to threads, 1 to 16 times 16 bytes each");
  }
  if (shared_bytes_of(config, p) > static_cast<std::size_t>(target.shared_memory)) {
    return Support::no("needs " + std::to_string(shared_bytes_of(config, p)) +
                       " bytes of shared memory; the target has " + std::to_string(target.shared_memory));
  }
  return Support::yes();
}

KernelSource source_of(const LinearConfig& c, const Problem& p) {
  const bool ring = p.linear.ring > 0;
  const std::string kernel = ring ? "linear_ring" : "linear_decode";
  KernelSource source;
  source.name = kernel + words_of(c, Words::all);
  source.text =
      to_string({.file = "cuda/linear/" + kernel + ".cuh",
                 .definitions = configuration_line(c),
                 .bounds = std::string("config.threads()") + (c.is_small() ? ", config.resident(__CUDA_ARCH__)" : ""),
                 .parameters = {ring ? "LinearRingParams params" : "LinearParams params"},
                 .call = std::string(ring ? "LinearRing" : "LinearDecode") + "<config>::run(" +
                         (c.parts > 1 ? "LinearDecode<config>::key_part(params))" : "params)")});
  source.shared_bytes = shared_bytes_of(c, p);
  return source;
}

KernelSource source_of(const LinearSumConfig& c) {
  return {"linear_sum" + words_of(c, Words::all), to_string({.file = "cuda/linear/linear_sum.cuh",
                                                             .definitions = configuration_line(c),
                                                             .bounds = "config.threads()",
                                                             .parameters = {"LinearSumParams params"},
                                                             .call = "LinearSum<config>::run(params)"})};
}

void plan(detail::PlanState& state) {
  const Problem& p = state.problem;
  const LinearConfig config = config_of(p, state.target, state.wishes);
  state.kernels = {source_of(config, p)};
  state.choice = "kernel: " + state.kernels.front().name + "\n" + "a block of " + std::to_string(config.threads()) +
                 " threads takes " + std::to_string(config.tile) + " of head_dim_v, a thread " +
                 std::to_string(config.loads()) + " times 16 bytes of the state\n";
  if (config.parts > 1) {
    state.splits = config.parts;
    state.kernels.push_back(source_of(LinearSumConfig{element_of(p.o_type), config.parts}));
    state.choice +=
        "splits: " + std::to_string(config.parts) + " parts of head_dim_qk, then " + state.kernels.back().name + "\n";
    state.workspace_bytes = static_cast<std::size_t>(config.parts * outputs(p)) * sizeof(float);
  }
  state.prepared = config;
}

LinearParams params_of(const Problem& problem, const Bindings& bindings) {
  LinearParams p{};
  p.q = bindings[Slot::q].bytes();
  p.k = bindings[Slot::k].bytes();
  p.v = bindings[Slot::v].bytes();
  p.o = bindings[Slot::o].bytes();
  p.q_strides = row_strides(bindings[Slot::q]);
  p.k_strides = row_strides(bindings[Slot::k]);
  p.v_strides = row_strides(bindings[Slot::v]);
  p.o_strides = row_strides(bindings[Slot::o]);
  const Tensor& state = bindings[Slot::state];
  p.state = state.bytes();
  p.slot_stride = state.strides[0];
  p.head_stride = state.strides[1];
  p.row_stride = state.strides[2];
  p.slots = problem.linear.states;
  const Tensor& sources = bindings[Slot::state_slots];
  const Tensor& targets = bindings[Slot::dest_slots];
  if (sources) p.state_slots = sources.bytes();
  if (targets) p.dest_slots = targets.bytes();
  p.long_state_slots = sources.dtype == DType::int64;
  p.long_dest_slots = targets.dtype == DType::int64;
  p.slopes = bindings[Slot::decay_slopes].as<float>();
  p.scale = problem.softmax_scale();
  p.tokens = static_cast<int>(problem.seqlen_q);
  p.seed = bindings.seed;
  p.offset = bindings.offset;
  p.seed_at = bindings[Slot::dropout_seed].as<u64>();
  p.offset_at = bindings[Slot::dropout_offset].as<u64>();
  return p;
}

LinearRingParams ring_params_of(const Problem& problem, const Bindings& bindings) {
  const auto strides = [](const Tensor& ring) { return Strides{ring.strides[0], ring.strides[2], ring.strides[1]}; };
  LinearRingParams p{};
  p.step = params_of(problem, bindings);
  p.ring_k = bindings[Slot::ring_k].bytes();
  p.ring_v = bindings[Slot::ring_v].bytes();
  p.ring_k_strides = strides(bindings[Slot::ring_k]);
  p.ring_v_strides = strides(bindings[Slot::ring_v]);
  p.cursors = bindings[Slot::ring_cursor].as<int>();
  p.ring = static_cast<int>(problem.linear.ring);
  return p;
}

// Redirects the outputs of the parts to the workspace. Returns the parameters of the kernel that adds them into o.
LinearSumParams redirect(LinearParams& params, const Problem& problem, std::byte* workspace) {
  LinearSumParams sum{};
  sum.parts = reinterpret_cast<const float*>(workspace);
  sum.o = params.o;
  sum.o_strides = params.o_strides;
  sum.count = static_cast<int>(outputs(problem));
  sum.columns = Divisor(static_cast<int>(problem.head_dim_v));
  sum.heads = Divisor(static_cast<int>(problem.heads_q));
  sum.tokens = Divisor(static_cast<int>(problem.seqlen_q));
  params.o = workspace;
  params.o_part = outputs(problem);
  const std::int64_t row = problem.heads_q * problem.head_dim_v;
  params.o_strides = {.batch = problem.seqlen_q * row, .row = row, .head = problem.head_dim_v};
  return sum;
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  if (problem.batch == 0) return;
  const auto& config = *std::any_cast<LinearConfig>(&state.prepared);
  LinearParams params{};
  LinearRingParams ring_params{};
  LinearSumParams sum{};
  void* parameters[] = {&params};
  if (problem.linear.ring > 0) {
    ring_params = ring_params_of(problem, bindings);
    parameters[0] = &ring_params;
  } else {
    params = params_of(problem, bindings);
    if (config.parts > 1) sum = redirect(params, problem, resources.workspace);
  }
  const Dim3 grid{static_cast<std::uint32_t>(problem.head_dim_v / config.tile * config.parts),
                  static_cast<std::uint32_t>(problem.heads_q), static_cast<std::uint32_t>(problem.batch)};
  resources.kernels.front()->launch(grid, {static_cast<std::uint32_t>(config.threads())},
                                    shared_bytes_of(config, problem), resources.stream.handle, parameters,
                                    Begins::early);
  if (config.parts == 1) return;
  constexpr int threads = LinearSumConfig::threads();
  parameters[0] = &sum;
  resources.kernels[1]->launch({static_cast<std::uint32_t>(divide_up(sum.count, threads))}, {threads}, 0,
                               resources.stream.handle, parameters, Begins::early);
}

}  // namespace

const Implementation kLinearDecode = {
    {"cuda.linear_decode", DeviceType::cuda, Operation::linear_decode, supports, plan}, run};

}  // namespace tessera::cuda
