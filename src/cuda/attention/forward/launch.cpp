// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <random>

#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/kernel_source.h"
#include "cuda/attention/kv/tensor_map.h"
#include "cuda/attention/params.h"
#include "cuda/attention/sparse/tile_mass.h"
#include "cuda/attention/splits/combine.h"
#include "cuda/attention/splits/partials.h"
#include "cuda/attention/tiles/list_params.h"
#include "cuda/driver/device.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostRowStride = std::int64_t{1} << 29;  // elements, up to 4 bytes each: 32 bits hold the bytes
constexpr std::int64_t kMostGrid = 65535;  // sequences and heads: blocks in y and z of other kernels
constexpr std::int64_t kMostSplits = 256;

Support supports_features(const Problem& p) {
  if (p.q_type != p.k_type || p.q_type != p.v_type || (p.q_type != DType::bf16 && p.q_type != DType::fp16)) {
    return Support::no("wants q, k and v of one type, bf16 or fp16");
  }
  if (p.o_type != p.q_type && p.o_type != DType::fp32) return Support::no("writes o in q's type or fp32");
  if (const Support s = has_callables(p); !s) return s;
  return Support::yes();
}

/// What every run of a plan launches.
struct FwdLaunch {
  FwdConfig config;
  int packed_heads;
  TileSchedule schedule;
  Dim3 grid;
  Dim3 block;
  std::size_t shared_bytes;        // of a block
  TileCounterParams tile_counter;  // a tag of 0: blocks draw no further row tiles
  std::size_t counters_at;         // in the workspace, if they do
};

constexpr std::int64_t kMostCountedTiles = (std::int64_t{1} << 24) - 1;  // tiles/tile_counter.cuh

// Another for every plan of this process, and hardly ever one that another process has left behind.
std::uint64_t next_tag() {
  constexpr std::uint64_t most = (std::uint64_t{1} << 40) - 1;
  static std::atomic<std::uint64_t> next{std::random_device{}() * std::uint64_t{256}};
  return next.fetch_add(1, std::memory_order_relaxed) % most + 1;
}

// A block of products by warpgroups stays on its multiprocessor and takes one row tile after another.
std::int64_t grid_blocks(const FwdConfig& config, const Problem& problem, std::int64_t splits, const Target& target) {
  const std::int64_t blocks = count_blocks(config, problem, splits);
  if (config.products != Products::wgmma || target.multiprocessors == 0) return blocks;
  const int together = std::min(blocks_that_fit(shared_bytes(config, problem), target), config.blocks());
  return std::min<std::int64_t>(blocks, together * target.multiprocessors);
}

FwdLaunch launch_of(const Problem& problem, const FwdConfig& config, std::int64_t splits, const Target& target) {
  return {config,
          static_cast<int>(packed_heads(problem)),
          tile_schedule(config, problem, splits),
          {static_cast<std::uint32_t>(grid_blocks(config, problem, splits, target))},
          {static_cast<std::uint32_t>(config.block_threads())},
          static_cast<std::size_t>(shared_bytes(config, problem)),
          {},
          0};
}

// An emulated chip's multiprocessor may have room for fewer blocks than the present one's: then a block asks for more
// than it needs, so that no more of them share a multiprocessor here.
std::size_t bytes_to_ask_for(std::size_t bytes, const Target& target) {
  if (!target.emulated) return bytes;
  constexpr std::int64_t kKept = 1024;  // of each block, by the driver: blocks_that_fit
  const std::int64_t room = device(target.index).shared_memory + kKept;
  const std::int64_t one_more = blocks_that_fit(static_cast<int>(bytes), target) + 1;
  const std::int64_t too_many = round_up(room / one_more + 1, std::int64_t{16});
  return std::max(bytes, static_cast<std::size_t>(too_many - kKept));
}

// What TMA cannot do, in dimensions of more than one element; a stride of 0 between heads, sequences or
// pages is one of them for all.
void check_map_strides(Slot slot, const Strides& strides, std::int64_t rows, std::int64_t heads, std::int64_t batch) {
  const auto check = [&](i64 stride, std::int64_t size, i64 least, const char* between) {
    if (size <= 1 || stride >= least) return;
    throw Error(ErrorCode::unsupported, std::string(to_string(slot)),
                "a stride of " + std::to_string(stride) + " elements between " + between,
                "at least " + std::to_string(least) + ", or the wish loader=cp_async");
  };
  check(strides.row, rows, 1, "rows");
  check(strides.head, heads, 0, "heads");
  check(strides.batch, batch, 0, "sequences or pages");
}

void check_row_stride(Slot slot, const Tensor& tensor) {
  const i64 stride = row_strides(tensor).row;
  if (std::abs(stride) < kMostRowStride) return;
  throw Error(ErrorCode::unsupported, std::string(to_string(slot)),
              "a stride of " + std::to_string(stride) + " elements between rows",
              "less than " + std::to_string(kMostRowStride) + " either way on cuda");
}

// Whether 64 packed rows are a box: whole queries, in a tensor that TMA can walk. A stride of 0 between
// sequences, or heads that are not packed, is one of them for all.
bool has_query_boxes(const Problem& problem, const Strides& strides, std::int64_t rows, int packed_heads) {
  constexpr i64 kMostStride = i64{1} << 39;
  const auto walks = [](i64 stride, std::int64_t size, i64 least) {
    return size <= 1 || (stride >= least && stride < kMostStride);
  };
  return 64 % packed_heads == 0 && walks(strides.row, rows, 1) && walks(strides.batch, problem.batch, 0) &&
         walks(strides.head, problem.heads_q, packed_heads > 1 ? 1 : 0);
}

TensorMaps tensor_maps(const FwdConfig& config, const Problem& problem, const FwdParams& params, int packed_heads) {
  TensorMaps maps{};
  const std::int64_t queries = params.cu_seqlens_q != nullptr ? problem.total_q : problem.seqlen_q;
  if (config.products == Products::wgmma && has_query_boxes(problem, params.q_strides, queries, packed_heads)) {
    maps.queries =
        tensor_map(params.q, params.q_strides, {params.d, problem.heads_q, queries, problem.batch},
                   {.columns = columns_of_panel(config.d), .heads = packed_heads, .rows = 64 / packed_heads});
    maps.has_queries = 1;
  }
  for (int i = 0; i < config.segments; ++i) {
    const KvParams& kv = params.kv[i];
    const bool paged = kv.page_table != nullptr;
    const std::int64_t rows = paged ? kv.page_size.value : kv.cu_seqlens != nullptr ? kv.total : kv.capacity;
    const std::int64_t batch = paged ? kv.pages : problem.batch;
    check_map_strides(i == 0 ? Slot::k : Slot::k2, kv.k_strides, rows, problem.heads_kv, batch);
    check_map_strides(i == 0 ? Slot::v : Slot::v2, kv.v_strides, rows, problem.heads_kv, batch);
    // The driver wants an address for what is empty too.
    const auto map = [&](const void* tensor, const Strides& strides, std::int64_t dim, int padded) {
      return tensor_map(tensor != nullptr ? tensor : params.q, strides, {dim, problem.heads_kv, rows, batch},
                        {.columns = columns_of_panel(padded), .heads = 1, .rows = kv.box_rows});
    };
    maps.keys[i] = map(kv.k, kv.k_strides, params.d, config.d);
    maps.values[i] = map(kv.v, kv.v_strides, params.dv, config.dv);
  }
  return maps;
}

}  // namespace

Support supports_forward(const Problem& problem, const Target& target, const Wishes& wishes, Products products,
                         ConfigSupport exists) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  if (const Support s = supports_features(problem); !s) return s;
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 2;
  if (problem.seqlen_q * (problem.heads_q / problem.heads_kv) > most || problem.kv.seqlen > most ||
      problem.total_q > most || problem.kv.total > most ||
      (problem.kv2 && std::max(problem.kv2->seqlen, problem.kv2->total) > most)) {
    return Support::no("counts rows of a sequence in 32 bits");
  }
  if (problem.batch > kMostGrid || problem.heads_q / packed_heads(problem) > kMostGrid) {
    return Support::no("wants at most 65535 sequences and heads");
  }
  if (gathers_mass(problem)) {
    if (const Support s = supports_mass(problem); !s) return s;
  }
  const std::int64_t splits = choose_splits(problem, target, wishes, products);
  if (splits < 1 || splits > kMostSplits || splits * problem.batch > kMostGrid) {
    return Support::no("splits is " + std::to_string(splits) + "; want 1 to 256, at most 65535 with all sequences");
  }
  if (splits > 1 && problem.batch_invariant) {
    return Support::no("splits is " + std::to_string(splits) + "; batch_invariant keeps one part per sequence");
  }
  const FwdConfig config = fwd_config(problem, target, splits, wishes, products);
  if (const Support s = exists(config, problem, target, wishes); !s) return s;
  if (problem.list && list_cells(config, problem) > FwdConfig::kMostCells) {
    return Support::no("collects at most " + std::to_string(FwdConfig::kMostCells) + " runs of " +
                       std::to_string(config.run) + " keys; the list's problem has " +
                       std::to_string(list_cells(config, problem)));
  }
  const std::int64_t most_tiles = products == Products::wgmma ? kMostCountedTiles : std::numeric_limits<int>::max();
  if (const std::int64_t tiles = count_blocks(config, problem, splits); tiles > most_tiles) {
    return Support::no("needs " + std::to_string(tiles) + " row tiles; want at most " + std::to_string(most_tiles));
  }
  const int bytes = shared_bytes(config, problem);
  if (bytes > target.shared_memory) {
    return Support::no("needs " + std::to_string(bytes) + " bytes of shared memory; the target has " +
                       std::to_string(target.shared_memory));
  }
  if (problem.list && (wishes.tile_q || wishes.tile_kv || wishes.warps)) {
    return Support::no("tile_q, tile_kv and warps cannot be wished for beside a list: its blocks decide them");
  }
  return Support::yes();
}

void plan_forward(detail::PlanState& state, Products products) {
  const Problem& problem = state.problem;
  state.splits = choose_splits(problem, state.target, state.wishes, products);
  const FwdConfig config = fwd_config(problem, state.target, state.splits, state.wishes, products);
  FwdLaunch launch = launch_of(problem, config, state.splits, state.target);
  state.tile_q = config.tile_q;
  state.tile_kv = config.tile_kv;
  state.kernels = {fwd_source(config, callable_sources(problem))};
  state.choice = "kernel: " + state.kernels.front().name + "\nshared memory: " + std::to_string(launch.shared_bytes) +
                 " bytes a block of " + std::to_string(launch.block.x) + " threads\n";
  if (state.splits > 1) {
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
  if (launch.grid.x < static_cast<std::uint32_t>(launch.schedule.count)) {
    launch.tile_counter.tag = next_tag();
    launch.counters_at = round_up<std::size_t>(state.workspace_bytes, alignof(u64));
    state.workspace_bytes = launch.counters_at + 2 * sizeof(u64);
  }
  state.prepared = launch;
}

void run_forward(const detail::PlanState& state, const Bindings& bindings, const detail::Resources& resources) {
  const Problem& problem = state.problem;
  for (const Slot slot : {Slot::q, Slot::o, Slot::k, Slot::v, Slot::k2, Slot::v2}) {
    check_row_stride(slot, bindings[slot]);
  }
  const bool no_rows = problem.q_layout == Layout::varlen && problem.total_q == 0 && !gathers_mass(problem);
  if (problem.seqlen_q == 0 || problem.batch == 0 || no_rows) return;
  const auto& launch = std::any_cast<const FwdLaunch&>(state.prepared);
  const FwdConfig& config = launch.config;
  FwdParams params = fwd_params(problem, bindings, launch.packed_heads);
  if (problem.list) params.list = list_params(config, problem, bindings);
  std::byte* masses = resources.workspace + partials_bytes(problem, state.splits);
  if (gathers_mass(problem)) keep_rows(params, problem, state.splits, masses);
  const FwdParams whole = params;
  CombineParams merge{};
  if (state.splits > 1) {
    merge = redirect_to(Partials(problem, state.splits), resources.workspace, problem, params);
  }
  params.schedule = launch.schedule;
  if (launch.tile_counter.tag != 0) {
    u64* counters = reinterpret_cast<u64*>(resources.workspace + launch.counters_at);
    params.tile_counter = {counters, counters + 1, launch.tile_counter.tag};
  }
  TensorMaps maps{};
  if (config.uses_tma()) {
    params.kv[0].box_rows = box_rows(config, problem.kv);
    if (problem.kv2) params.kv[1].box_rows = box_rows(config, *problem.kv2);
    maps = tensor_maps(config, problem, params, launch.packed_heads);
  }
  void* parameters[] = {&params, &maps};
  resources.kernels.front()->launch(launch.grid, launch.block, bytes_to_ask_for(launch.shared_bytes, state.target),
                                    resources.stream.handle, parameters, Begins::early);
  if (state.splits > 1) launch_combine(*resources.kernels[1], merge, problem.batch, problem.seqlen_q, resources.stream);
  if (gathers_mass(problem)) {
    launch_mass(config, whole, problem, bindings, state.splits, masses, resources.kernels.last(2), resources.stream);
  }
}

}  // namespace tessera::cuda
