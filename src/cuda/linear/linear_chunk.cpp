// SPDX-License-Identifier: Apache-2.0
// The rows cuda.linear_chunk and cuda.linear_chunk_wgmma of the table: linear attention of whole sequences and its
// gradient, both as walks (operations/linear_walks.h).
#include <algorithm>
#include <limits>

#include "cuda/attention/params.h"
#include "cuda/driver/occupancy.h"
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "operations/linear_walks.h"
#include "shared/config.h"
#include "shared/linear_chunk.h"

namespace tessera::cuda {
namespace {

using detail::LinearWalk;

constexpr std::int64_t kMostGrid = 65535;  // blocks in y and z
constexpr int kMostState = 128 * 64;       // elements of S that fit into the registers of a block's update warps

std::int64_t dim_x(const Problem& p, const LinearWalk& walk) { return walk.transposed ? p.head_dim_v : p.head_dim_qk; }
std::int64_t dim_z(const Problem& p, const LinearWalk& walk) { return walk.transposed ? p.head_dim_qk : p.head_dim_v; }

/// One kernel runs all walks whose x has the same dim.
struct Launch {
  ChunkConfig config;
  std::int64_t x;
};

/// Whether a result of the walk is an fp32 state, which must be as exact as sums in fp32.
bool is_exact(const Problem& p, const LinearWalk& walk) {
  if (walk.last == Slot::count_ || p.linear.states == 0) return false;
  return walk.last == Slot::dstate_initial || p.linear.state_type == DType::fp32;
}

/// Takes the first tile that fits: 64 tokens or else 32, and for each 64 columns of z or else 32. With 64 columns, x
/// and y are read half as often. But if x is 64, wgmma and exact walks take 32 columns, because twice as many blocks
/// are faster.
ChunkConfig config_of(const Problem& p, std::int64_t x, const Target& target, const Wishes& wishes, Products products) {
  ChunkConfig config;
  config.wgmma = products == Products::wgmma;
  config.type = element_of(p.q_type);
  config.x = static_cast<int>(x);
  for (const LinearWalk& walk : detail::linear_walks(p)) {
    if (dim_x(p, walk) == x && is_exact(p, walk)) config.terms = p.q_type == DType::bf16 ? 3 : 2;
  }
  const auto fits = [&] { return config.smem_bytes() <= target.shared_memory; };
  for (const int chunk : {64, 32}) {
    for (const int tile : {64, 32}) {
      config.chunk = static_cast<int>(wishes.tile_q.value_or(chunk));
      const bool light = config.x == 64 && (config.wgmma || config.terms > 1);
      if (light && tile == 64 && !wishes.tile_kv) continue;
      config.tile = static_cast<int>(wishes.tile_kv.value_or(tile));
      config.stages = static_cast<int>(wishes.stages.value_or(config.wgmma ? 3 : 2));
      if (!wishes.stages && !fits()) config.stages = 2;
      // Registers: an update warp has x / 4 rows of `tile` columns.
      config.blocks =
          config.x * config.tile <= (config.wgmma ? 64 : 128) * 32 && blocks_that_fit(config.smem_bytes(), target) >= 2
              ? 2
              : 1;
      if ((wishes.tile_kv || config.x * config.tile <= kMostState) && fits()) return config;
    }
  }
  return config;
}

Support supports_wishes(const Wishes& wishes) {
  if (wishes.splits.value_or(1) != 1 || wishes.warps || !wishes.loader.empty()) {
    return Support::no("takes the wishes tile_q (tokens of a chunk), tile_kv (columns of a state, a block) and stages");
  }
  if (wishes.tile_q && *wishes.tile_q != 32 && *wishes.tile_q != 64) return Support::no("tile_q is 32 or 64");
  if (wishes.tile_kv && *wishes.tile_kv != 32 && *wishes.tile_kv != 64) return Support::no("tile_kv is 32 or 64");
  if (wishes.stages && (*wishes.stages < 2 || *wishes.stages > 4)) return Support::no("stages are 2 to 4");
  return Support::yes();
}

Support supports_walks(const Problem& p, const Target& target, const Wishes& wishes, Products products) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  const bool half = p.q_type == DType::bf16 || p.q_type == DType::fp16;
  if (!half || p.k_type != p.q_type || p.v_type != p.q_type || p.o_type != p.q_type) {
    return Support::no("wants q, k, v and o of one type, bf16 or fp16");
  }
  for (const std::int64_t dim : {p.head_dim_qk, p.head_dim_v}) {
    if (dim != 64 && dim != 128 && dim != 256) {
      return Support::no("head dims of " + std::to_string(dim) + "; want 64, 128 or 256");
    }
  }
  if (p.batch > kMostGrid || p.heads_q > kMostGrid) return Support::no("wants at most 65535 sequences and heads");
  if (std::max(p.seqlen_q, p.total_q) > std::numeric_limits<int>::max() / 2) {
    return Support::no("counts tokens in 32 bits");
  }
  if (const Support s = supports_wishes(wishes); !s) return s;
  for (const LinearWalk& walk : detail::linear_walks(p)) {
    const ChunkConfig config = config_of(p, dim_x(p, walk), target, wishes, products);
    if (config.x * config.tile > kMostState) return Support::no("tile_kv is 32 where a head dim is 256");
    if (config.smem_bytes() <= target.shared_memory) continue;
    return Support::no("needs " + std::to_string(config.smem_bytes()) + " bytes of shared memory; the target has " +
                       std::to_string(target.shared_memory));
  }
  return Support::yes();
}

Support supports(const Problem& p, const Target& target, const Wishes& wishes) {
  return supports_walks(p, target, wishes, Products::mma_sync);
}

Support supports_wgmma(const Problem& p, const Target& target, const Wishes& wishes) {
  if (target.sm != 90) return Support::no("wants SM90");
  if (wishes.tile_q.value_or(64) != 64) return Support::no("tile_q is 64");
  return supports_walks(p, target, wishes, Products::wgmma);
}

KernelSource source_of(const ChunkConfig& c) {
  KernelSource source;
  const std::string products = c.wgmma ? "wgmma" : "mma";
  source.name = "linear_chunk " + products + " " + name_of(c.type) + words_of(c, Words::all, {"type", "wgmma"});
  source.text = to_string({.file = "cuda/linear/linear_chunk_" + products + ".cuh",
                           .definitions = configuration_line(c),
                           .bounds = "config.threads(), config.blocks",
                           .parameters = {"ChunkParams params"},
                           .call = "LinearChunk<config>::run(params)"});
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  return source;
}

template <Products products>
void plan(detail::PlanState& state) {
  const Problem& p = state.problem;
  std::vector<Launch> launches;
  for (const LinearWalk& walk : detail::linear_walks(p)) {
    const std::int64_t x = dim_x(p, walk);
    if (std::any_of(launches.begin(), launches.end(), [x](const Launch& launch) { return launch.x == x; })) continue;
    const ChunkConfig config = config_of(p, x, state.target, state.wishes, products);
    launches.push_back({config, x});
    state.kernels.push_back(source_of(config));
    state.choice += "kernel: " + state.kernels.back().name + "\n" + "a block walks " + std::to_string(config.tile) +
                    " columns of a head's state, " + std::to_string(config.chunk) + " tokens at a time\n";
  }
  state.prepared = std::move(launches);
}

ChunkStates states_of(const Problem& problem, const Bindings& bindings, const LinearWalk& walk, Slot slot, bool last) {
  ChunkStates states{};
  if (slot == Slot::count_ || !bindings[slot]) return states;
  const Tensor& tensor = bindings[slot];
  states.data = reinterpret_cast<char*>(tensor.bytes());
  states.strides[0] = tensor.strides[0];
  states.strides[1] = tensor.strides[1];
  const bool rows_of_z = detail::rows_of_z(problem, walk);
  states.strides[rows_of_z ? 3 : 2] = tensor.strides[2];
  states.strides[rows_of_z ? 2 : 3] = 1;
  states.count = tensor.shape[0];
  states.is_bf16 = tensor.dtype == DType::bf16;
  if (slot != Slot::state) return states;
  const Tensor& indices = last && bindings[Slot::dest_slots] ? bindings[Slot::dest_slots] : bindings[Slot::state_slots];
  if (!indices) return states;
  states.indices = indices.bytes();
  states.long_indices = indices.dtype == DType::int64;
  return states;
}

ChunkWalk walk_of(const Problem& problem, const Bindings& bindings, const LinearWalk& from) {
  ChunkWalk walk{};
  walk.x = bindings[from.x].bytes();
  walk.y = bindings[from.y].bytes();
  walk.z = bindings[from.z].bytes();
  walk.out = bindings[from.out].bytes();
  walk.x_strides = row_strides(bindings[from.x]);
  walk.y_strides = row_strides(bindings[from.y]);
  walk.z_strides = row_strides(bindings[from.z]);
  walk.out_strides = row_strides(bindings[from.out]);
  walk.first = states_of(problem, bindings, from, from.first, false);
  walk.last = states_of(problem, bindings, from, from.last, true);
  walk.backwards = from.backwards;
  walk.exact = is_exact(problem, from) && walk.last.data != nullptr;
  const float scale = problem.softmax_scale();
  walk.y_scale = from.backwards ? scale : 1.0F;
  walk.out_scale = from.backwards ? 1.0F : scale;
  return walk;
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  if (problem.batch == 0) return;
  const auto& launches = *std::any_cast<std::vector<Launch>>(&state.prepared);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const ChunkConfig& config = launches[i].config;
    ChunkParams params{};
    std::uint32_t walks = 0;
    for (const LinearWalk& walk : detail::linear_walks(problem)) {
      if (dim_x(problem, walk) != launches[i].x) continue;
      params.walks[walks++] = walk_of(problem, bindings, walk);
      params.tiles = static_cast<int>(dim_z(problem, walk) / config.tile);
    }
    params.seqlen = static_cast<int>(problem.seqlen_q);
    params.total = static_cast<int>(problem.total_q);
    if (const Tensor& ends = bindings[Slot::cu_seqlens_q]) params.cu_seqlens = ends.as<int>();
    params.slopes = bindings[Slot::decay_slopes].as<float>();
    void* parameters[] = {&params};
    const Dim3 grid{walks * static_cast<std::uint32_t>(params.tiles), static_cast<std::uint32_t>(problem.heads_q),
                    static_cast<std::uint32_t>(problem.batch)};
    resources.kernels[i]->launch(grid, {static_cast<std::uint32_t>(config.threads())},
                                 static_cast<std::size_t>(config.smem_bytes()), resources.stream.handle, parameters);
  }
}

}  // namespace

const Implementation kLinearChunk = {
    {"cuda.linear_chunk", DeviceType::cuda, Operation::linear_chunk, supports, plan<Products::mma_sync>}, run};
const Implementation kLinearChunkWgmma = {
    {"cuda.linear_chunk_wgmma", DeviceType::cuda, Operation::linear_chunk, supports_wgmma, plan<Products::wgmma>}, run};

}  // namespace tessera::cuda
