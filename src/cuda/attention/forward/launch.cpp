// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/launch.h"

#include <algorithm>
#include <atomic>
#include <random>

#include "base/element.h"
#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/kernel_source.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/kv/tensor_map.h"
#include "cuda/attention/masks/mask_tiles.h"
#include "cuda/attention/params.h"
#include "cuda/attention/sparse/skip_params.h"
#include "cuda/attention/sparse/tile_mass.h"
#include "cuda/attention/splits/combine.h"
#include "cuda/attention/splits/partials.h"
#include "cuda/attention/tiles/list_params.h"
#include "cuda/driver/occupancy.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"

namespace tessera::cuda {
namespace {

/// What every run of a plan launches.
struct FwdLaunch {
  Problem problem;  // including the list that an earlier kernel makes of its mask, if any
  FwdConfig config;
  int packed_heads;
  TileSchedule schedule;
  Dim3 grid;
  Dim3 block;
  std::size_t shared_bytes;  // of a block
  u64 tag;                   // of the counters of row tiles or splits; 0: there are none
  std::size_t counters_at;   // offset of the counters in the workspace
  MaskTiles mask;
  std::size_t mask_at;  // offset in the workspace of what the mask's kernel writes
};

// Returns a different tag for every plan of this process. It hardly ever is one that another process has left in
// memory.
std::uint64_t next_tag() {
  constexpr std::uint64_t most = (std::uint64_t{1} << 40) - 1;
  static std::atomic<std::uint64_t> next{std::random_device{}() * std::uint64_t{256}};
  return next.fetch_add(1, std::memory_order_relaxed) % most + 1;
}

// With wgmma blocks are persistent: each takes one row tile after another.
std::int64_t grid_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits, const Target& target) {
  const std::int64_t blocks = count_blocks(config, problem, splits);
  if (config.products != Products::wgmma || target.multiprocessors == 0) return blocks;
  const int together = std::min(blocks_that_fit(config.smem_bytes(), target), config.blocks());
  return std::min<std::int64_t>(blocks, together * target.multiprocessors);
}

FwdLaunch launch_of(const Problem& problem, const FwdConfig& config, std::int64_t splits, const Target& target) {
  return {problem,
          config,
          static_cast<int>(packed_heads(problem)),
          tile_schedule(config, problem, splits, packed_heads(problem)),
          {static_cast<std::uint32_t>(grid_blocks(config, problem, splits, target))},
          {static_cast<std::uint32_t>(config.block_threads())},
          static_cast<std::size_t>(config.smem_bytes()),
          0,
          0,
          {},
          0};
}

TileCounterParams tile_counter(const FwdLaunch& launch, std::byte* workspace) {
  if (launch.tag == 0) return {};
  u64* counters = reinterpret_cast<u64*>(workspace + launch.counters_at);
  return {counters, counters + 1, launch.tag};
}

// Makes the tensor maps, and sets the box_rows of each source.
TensorMaps add_boxes(const FwdLaunch& launch, const Problem& problem, FwdParams& params) {
  if (!launch.config.uses_tma()) return {};
  params.kv[0].box_rows = box_rows(launch.config, problem.kv);
  if (problem.kv2) params.kv[1].box_rows = box_rows(launch.config, *problem.kv2);
  return tensor_maps(launch.config, problem, params, launch.packed_heads);
}

// Descales of packed tokens have no batch dimension.
struct DescaleStrides {
  i64 batch, head;
  bool packed;
};
DescaleStrides descale_strides(const Problem& problem, const Tensor& descales) {
  const bool packed = problem.quantization.grain == Grain::token && descales.rank == 2;
  return {packed ? 0 : descales.strides[0], descales.strides[packed ? 0 : 1], packed};
}

DescaleParams descale_params(const Problem& problem, const Bindings& bindings) {
  DescaleParams p{};
  const auto point_to = [&](Slot slot, const float*& at, i64& batch, i64& head) {
    const Tensor& descales = bindings[slot];
    if (!descales) return false;
    const DescaleStrides strides = descale_strides(problem, descales);
    at = descales.as<float>();
    batch = strides.batch;
    head = strides.head;
    return strides.packed;
  };
  p.packed_q = point_to(Slot::q_descale, p.q, p.q_batch, p.q_head);
  p.packed_k = point_to(Slot::k_descale, p.k, p.k_batch, p.k_head);
  point_to(Slot::v_descale, p.v, p.v_batch, p.v_head);
  point_to(Slot::k_mean, p.mean, p.mean_batch, p.mean_head);
  const Quantization& quantization = problem.quantization;
  if (quantization.grain == Grain::block) p.tokens = Divisor(static_cast<int>(quantization.block));
  return p;
}

// Throws unless rows of 8 bits are aligned to 16 bytes, as their copies require. Elsewhere rows are only known to be
// aligned to 8 elements. Q that is widened to 16 bits is read 8 bytes at a time.
void check_byte_rows(const FwdConfig& config, const Bindings& bindings) {
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::k2, Slot::v2}) {
    if (slot == Slot::q && config.widens_queries) continue;
    const Tensor& tensor = bindings[slot];
    if (!tensor || !detail::is_quantised(tensor.dtype)) continue;
    bool aligned = reinterpret_cast<std::uintptr_t>(tensor.bytes()) % kChunkBytes == 0;
    for (int i = 0; i + 1 < tensor.rank; ++i) {
      const auto at = static_cast<std::size_t>(i);
      aligned = aligned && (tensor.shape[at] <= 1 || tensor.strides[at] % kChunkBytes == 0);
    }
    if (aligned) continue;
    throw Error(ErrorCode::unsupported, std::string(to_string(slot)), tensor.describe(),
                "rows of 8 bits that begin at multiples of 16 bytes on cuda");
  }
}

bool has_rows(const Problem& problem) {
  const bool no_tokens = problem.q_layout == Layout::varlen && problem.total_q == 0;
  return problem.seqlen_q > 0 && problem.batch > 0 && (!no_tokens || gathers_mass(problem));
}

}  // namespace

void plan_forward(detail::PlanState& state, Products products) {
  const bool may_list = products != Products::mma_by_keys;
  const Problem problem = may_list ? with_mask_list(state.problem, state.wishes) : state.problem;
  state.splits = choose_splits(problem, state.target, state.wishes, products);
  const FwdConfig config = fwd_config(problem, state.target, state.splits, state.wishes, products);
  FwdLaunch launch = launch_of(problem, config, state.splits, state.target);
  state.tile_q = config.tile_q;
  state.tile_kv = config.tile_kv;
  CallableSources callables = callable_sources(problem);
  if (config.mask_bits) callables.mask = {};
  state.kernels = {fwd_source(config, callables)};
  state.choice = "kernel: " + state.kernels.front().name + "\nshared memory: " + std::to_string(launch.shared_bytes) +
                 " bytes a block of " + std::to_string(launch.block.x) + " threads\n";
  if (config.merges) {
    state.choice +=
        "splits: " + std::to_string(state.splits) + " parts of the keys, merged by the last block of each row\n";
  } else if (state.splits > 1) {
    state.kernels.push_back(source_of(CombineConfig{Element::fp32, element_of(problem.o_type)}));
    state.choice +=
        "splits: " + std::to_string(state.splits) + " parts of the keys, then " + state.kernels.back().name + "\n";
  }
  state.workspace_bytes = partials_bytes(problem, state.splits);
  if (gathers_mass(problem)) {
    state.workspace_bytes += mass_bytes(problem, state.splits);
    for (const KernelSource& source : mass_sources(config, problem)) {
      state.kernels.push_back(source);
      state.choice += "then " + source.name + "\n";
    }
  }
  if (problem.skip) state.workspace_bytes += skip_bytes(config, problem, launch.grid.x);
  if (launch.grid.x < static_cast<std::uint32_t>(launch.schedule.count)) {
    launch.tag = next_tag();
    launch.counters_at = round_up<std::size_t>(state.workspace_bytes, alignof(u64));
    state.workspace_bytes = launch.counters_at + 2 * sizeof(u64);
  }
  if (config.merges) {
    launch.tag = next_tag();
    launch.counters_at = state.workspace_bytes;
    const std::int64_t row_tiles = count_blocks(config, problem, 1);
    state.workspace_bytes += round_up<std::size_t>(static_cast<std::size_t>(row_tiles) * sizeof(u64), 64);
  }
  launch.mask = MaskTiles(problem, state.problem, config.mask_bits ? MaskBitsOf::queries : MaskBitsOf::nothing);
  if (config.by_keys()) launch.mask = {};
  if (launch.mask) {
    state.kernels.push_back(launch.mask.source(problem));
    state.choice += "in front: " + state.kernels.back().name + "\n";
    launch.mask_at = round_up<std::size_t>(state.workspace_bytes, 16);
    state.workspace_bytes = launch.mask_at + launch.mask.bytes();
  }
  state.prepared = std::move(launch);
}

void run_forward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  constexpr Slot kSlots[] = {Slot::q, Slot::o, Slot::o_residual, Slot::k, Slot::v, Slot::k2, Slot::v2};
  check_row_strides(bindings, kSlots);
  const auto& launch = std::any_cast<const FwdLaunch&>(state.prepared);
  const Problem& problem = launch.problem;
  if (!has_rows(problem)) return;
  const FwdConfig& config = launch.config;
  if (config.has_descales()) check_byte_rows(config, bindings);
  SkipFwdParams params{{fwd_params(problem, bindings, launch.packed_heads), nullptr, {}}, {}};
  if (problem.residual) {
    params.o_residual = bindings[Slot::o_residual].as<signed char>();
    params.o_residual_strides = row_strides(bindings[Slot::o_residual]);
  }
  if (state.problem.list) params.list = list_params(problem, bindings);
  if (launch.mask) {
    std::byte* memory = resources.workspace + launch.mask_at;
    launch.mask.complete(params.list, memory);
    launch.mask.launch(*resources.kernels.back(), params, memory, resources.stream);
  }
  if (problem.skip) params.skip = skip_params(problem, bindings, resources.workspace);
  std::byte* masses = resources.workspace + partials_bytes(problem, state.splits);
  if (gathers_mass(problem)) keep_rows(params, problem, state.splits, masses);
  const FwdParams whole = params;
  CombineParams merge{};
  if (state.splits > 1) {
    merge = redirect_to(Partials(problem, state.splits), resources.workspace, problem, params);
  }
  params.schedule = launch.schedule;
  params.tile_counter = tile_counter(launch, resources.workspace);
  TensorMaps maps = add_boxes(launch, problem, params);
  MergingFwdParams merging{params, merge};
  DescaleParams descales = descale_params(problem, bindings);
  void* parameters[] = {config.merges ? static_cast<void*>(&merging) : &params, &maps, &descales};
  if (!config.uses_tma()) parameters[1] = &descales;
  resources.kernels.front()->launch(launch.grid, launch.block, bytes_to_ask_for(launch.shared_bytes, state.target),
                                    resources.stream.handle, parameters, Begins::early);
  if (state.splits > 1 && !config.merges) {
    launch_combine(*resources.kernels[1], merge, problem.batch, problem.seqlen_q, resources.stream);
  }
  if (gathers_mass(problem)) {
    launch_mass(config, whole, descales, problem, bindings, state.splits, masses, resources.kernels.last(2),
                resources.stream);
  }
}

}  // namespace tessera::cuda
