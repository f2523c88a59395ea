// SPDX-License-Identifier: Apache-2.0
// The row cuda.fwd_mma of the table: what it supports, the configuration it chooses, its launch.
#include <algorithm>
#include <limits>

#include "core/implementations.h"
#include "cuda/combine.h"
#include "cuda/element.h"
#include "cuda/fwd_params.h"
#include "cuda/fwd_source.h"
#include "cuda/jit/kernel.h"
#include "cuda/list_params.h"
#include "cuda/partials.h"
#include "cuda/tensor_map.h"
#include "cuda/tile_mass.h"
#include "shared/config.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostRowStride = std::int64_t{1} << 24;  // elements; offsets within a tile are 32-bit
constexpr std::int64_t kMostGrid = 65535;                       // blocks in y and z
constexpr std::int64_t kMostSplits = 256;

bool is_paged(const KvSource& source) {
  return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
}

Source source_of(const Problem& problem) {
  if (problem.kv2 && is_paged(problem.kv) != is_paged(*problem.kv2)) return Source::mixed;
  return is_paged(problem.kv) ? Source::paged : Source::strided;
}

// Query heads that share the rows of a tile. Dropout's draws are cheapest where rows lie at consecutive positions, and
// a list of each head's own keeps heads apart.
std::int64_t packed_heads(const Problem& problem) {
  const bool apart = problem.dropout > 0.0F || (problem.list && problem.list.heads == TileList::Heads::q);
  return apart ? 1 : problem.group();
}

// Head dims that have configurations of their own; others run padded to the next.
int padded_dim(std::int64_t dim) {
  for (const int size : {32, 64, 96, 128, 192, 256, 384}) {
    if (dim <= size) return size;
  }
  return 512;
}

// 16 rows of more than 256 columns of O do not fit a warp's registers: two blocks share them.
void choose_dims(FwdConfig& config, const Problem& problem) {
  config.d = padded_dim(problem.head_dim_qk);
  const int dv = padded_dim(problem.head_dim_v);
  config.dv_parts = dv > 256 ? 2 : 1;
  config.dv = dv / config.dv_parts;
  if (config.d > 256) config.dv = round_up(config.dv, 64);  // whole panels: copies then go by 16 rows
}

// Keys of a tile, where little room leaves but few.
int most_keys(const FwdConfig& config) {
  if (config.d > 256) return 32;  // with 64 rows of 512 columns two blocks share the 228 KB of SM90
  // Addresses of mixed sources take registers.
  const bool short_of_registers = config.tile_m > 32 && std::max(config.d, config.dv) > 64;
  return config.source == Source::mixed && short_of_registers ? 32 : 128;
}

// Measured on an H200 over S 512 to 8192 (docs/performance.md): 32 rows a warp wherever O's registers leave room for
// them, because every fragment of K and V then serves two products. Narrower tiles where more than the plainest softmax
// needs registers too.
void choose_tile(FwdConfig& config, std::int64_t rows) {
  const int widest = std::max(config.d, config.dv);
  const bool plain = !config.scale_first && config.source == Source::strided && config.output == config.type;
  // Of few rows, as when decoding, most would be idle.
  config.tile_m = rows <= 32 ? 32 : rows <= 64 || widest > 128 ? 64 : 128;
  config.warps = config.tile_m == 32 ? 2 : 4;
  // Copies go by 16 rows, by 32 where a row is cut into panels of 32 columns.
  const bool by_32_rows = config.d % 64 != 0 || config.dv % 64 != 0;
  if (widest <= 64) {
    config.tile_n = plain ? 128 : by_32_rows ? 96 : 80;
  } else {
    config.tile_n = plain || config.dv != 128 ? 64 : by_32_rows ? 32 : 48;
  }
  config.tile_n = std::min(config.tile_n, most_keys(config));
  const bool two_stages = widest <= 64 || (widest <= 128 && !config.scale_first);
  config.stages = two_stages && config.source == Source::strided ? 2 : 1;
}

FwdConfig config_of(const Problem& problem, std::int64_t splits) {
  FwdConfig config;
  config.type = element_of(problem.q_type);
  config.output = splits > 1 ? Element::fp32 : element_of(problem.o_type);
  choose_dims(config, problem);
  config.source = source_of(problem);
  config.segments = problem.kv2 ? 2 : 1;
  config.affine = problem.affine.has_value();
  config.softcap = problem.softcap > 0.0F;
  config.alibi = problem.alibi;
  config.dropout = problem.dropout > 0.0F;
  config.user_score = !problem.score.empty();
  config.user_mask = !problem.mask.empty();
  config.scale_first = config.softcap || config.alibi || config.user_score || !(problem.softmax_scale() > 0.0F);
  choose_tile(config, problem.seqlen_q * packed_heads(problem));
  if (config.dropout || config.user_score || config.user_mask) {  // 16 rows a warp: these need registers too
    config.tile_m = std::min(config.tile_m, 64);
    config.tile_n = std::min(64, most_keys(config));
  }
  if (problem.list) choose_list_tiles(config, problem, packed_heads(problem), most_keys(config));
  return config;
}

std::int64_t row_tiles(const Problem& problem, const FwdConfig& config) {
  return (problem.seqlen_q * packed_heads(problem) + config.tile_m - 1) / config.tile_m;
}

// Blocks of the grid's first dimension.
std::int64_t row_blocks(const Problem& problem, const FwdConfig& config) {
  return row_tiles(problem, config) * config.dv_parts;
}

// Blocks of a split, by capacities.
std::int64_t count_blocks(const Problem& problem, const FwdConfig& config) {
  return row_blocks(problem, config) * (problem.heads_q / packed_heads(problem)) * problem.batch;
}

bool has_tma(const FwdConfig& config, const Target& target) {
  return target.sm >= 90 && config.source == Source::strided && config.tiles == Tiles::range && config.segments == 1 &&
         config.dv_parts == 1;
}

// Of a block; what a list adds depends on the problem's capacity, not on the code.
int shared_bytes(const FwdConfig& config, const Problem& problem) {
  return config.smem_bytes() + (problem.list ? config.list_bytes(static_cast<int>(list_cells(config, problem))) : 0);
}

FwdConfig config_of(const Problem& problem, const Target& target, std::int64_t splits, const Wishes& wishes) {
  FwdConfig config = config_of(problem, splits);
  // Two blocks share a multiprocessor. The driver keeps 1 KB for each; a multiprocessor has 1 KB more than a block may
  // ask for.
  const auto too_large = [&] { return 2 * (config.smem_bytes() + 1024) > target.shared_memory + 1024; };
  if (too_large()) {
    config.stages = 1;
    if (!problem.list) config.tile_n = std::min(config.tile_n, 96);  // a list's tiles are whole runs of its keys
  }
  // 99 KB hold 64 rows and 16 keys of 512 columns.
  if (config.d > 256 && shared_bytes(config, problem) > target.shared_memory) {
    config.tile_n = 16;
    config.run = 16;
  }
  // There the compiler needs a few registers more.
  if (target.sm >= 100 && config.tile_m == 128 && config.tile_n == 48) config.tile_n = 32;
  // On an H200 1 to 5% faster (docs/performance.md).
  if (target.sm == 90 && has_tma(config, target)) config.loader = Loader::tma;
  // With at most one block for each multiprocessor, twice as many of half the rows: 1.1 to 1.3 times as fast.
  if (config.tile_m == 128 && !problem.list && count_blocks(problem, config) <= target.multiprocessors) {
    config.tile_m = 64;
  }
  const auto wish = [](int& field, const std::optional<std::int64_t>& value) {
    if (value) field = static_cast<int>(std::min<std::int64_t>(*value, 1 << 20));
  };
  wish(config.tile_m, wishes.tile_q);
  wish(config.tile_n, wishes.tile_kv);
  wish(config.stages, wishes.stages);
  wish(config.warps, wishes.warps);
  if (!problem.list) config.run = config.tile_n;
  if (!wishes.loader.empty()) config.loader = wishes.loader == "tma" ? Loader::tma : Loader::cp_async;
  return config;
}

// Parts of the keys, each for blocks of its own: as many as fill the device twice, yet of at least 4 tiles each, since
// a part costs a partial result. The lengths that count are the capacities: the plan sees no others.
std::int64_t choose_splits(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (wishes.splits) return *wishes.splits;
  if (problem.batch_invariant || target.multiprocessors == 0) return 1;
  const FwdConfig config = config_of(problem, target, 1, wishes);
  const std::int64_t blocks = count_blocks(problem, config);
  const std::int64_t keys = problem.kv.seqlen + (problem.kv2 ? problem.kv2->seqlen : 0);
  const std::int64_t tiles = keys / config.tile_n;
  if (blocks == 0 || blocks * 5 > std::int64_t{target.multiprocessors} * 4) return 1;
  return std::clamp<std::int64_t>(2 * target.multiprocessors / blocks, 1, std::clamp<std::int64_t>(tiles / 4, 1, 64));
}

// Wishes may ask for what no kernel can be.
Support exists(const FwdConfig& c, const Target& target, const Wishes& wishes) {
  const auto refuse = [](const char* what, std::int64_t got, const std::string& want) {
    return Support::no(std::string(what) + " is " + std::to_string(got) + "; want " + want);
  };
  if (c.warps > 16 || (c.warps & (c.warps - 1)) != 0) return refuse("warps", c.warps, "1, 2, 4, 8 or 16");
  if (c.tile_m != c.warps * 16 && c.tile_m != c.warps * 32) return refuse("tile_q", c.tile_m, "16 or 32 rows a warp");
  if (c.stages > 4) return refuse("stages", c.stages, "1 to 4");
  // Copies go by as many rows as the block's threads have 16-byte chunks for.
  const int a_step = c.threads() / (c.d % 64 != 0 || c.dv % 64 != 0 ? 4 : 8);
  if (a_step % 8 != 0 || c.tile_m % a_step != 0)
    return refuse("warps", c.warps, "as many as copy tile_q in whole steps");
  if (c.tile_n % a_step != 0 || c.tile_n % 16 != 0 || c.tile_n > 256) {
    return refuse("tile_kv", c.tile_n, "a multiple of " + std::to_string(std::max(a_step, 16)) + " up to 256");
  }
  if (c.tests_elements() && c.tile_n > 128) return refuse("tile_kv", c.tile_n, "at most 128 beside a mask callable");
  constexpr int most = 208;
  if (c.accumulators() > most) {
    return Support::no("needs " + std::to_string(c.accumulators()) +
                       " registers a thread for scores and output; want at most " + std::to_string(most));
  }
  if (!wishes.loader.empty() && wishes.loader != "tma" && wishes.loader != "cp_async") {
    return Support::no("loader is " + wishes.loader + "; want cp_async or tma");
  }
  if (c.loader == Loader::tma && !has_tma(c, target)) {
    return Support::no(
        "loader is tma; that wants SM90 or newer, dense or varlen keys, one segment, no list, at most 256 columns of "
        "v");
  }
  return Support::yes();
}

Support supports_features(const Problem& p) {
  if (p.operation != Operation::attention || p.pass != Pass::forward) return Support::no("does the forward only");
  if (p.q_type != p.k_type || p.q_type != p.v_type || (p.q_type != DType::bf16 && p.q_type != DType::fp16)) {
    return Support::no("wants q, k and v of one type, bf16 or fp16");
  }
  if (p.o_type != p.q_type && p.o_type != DType::fp32) return Support::no("writes o in q's type or fp32");
  if (const Support s = has_callables(p); !s) return s;
  return Support::yes();
}

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (target.device != DeviceType::cuda) return Support::no("runs on CUDA; the target is " + target.to_string());
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  if (const Support s = supports_features(problem); !s) return s;
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 2;
  if (problem.seqlen_q * (problem.heads_q / problem.heads_kv) > most || problem.kv.seqlen > most ||
      problem.total_q > most || problem.kv.total > most) {
    return Support::no("counts rows of a sequence in 32 bits");
  }
  if (problem.batch > kMostGrid || problem.heads_q / packed_heads(problem) > kMostGrid) {
    return Support::no("wants at most 65535 sequences and heads");
  }
  if (gathers_mass(problem)) {
    if (const Support s = supports_mass(problem); !s) return s;
  }
  const std::int64_t splits = choose_splits(problem, target, wishes);
  if (splits < 1 || splits > kMostSplits || splits * problem.batch > kMostGrid) {
    return Support::no("splits is " + std::to_string(splits) + "; want 1 to 256, at most 65535 with all sequences");
  }
  if (splits > 1 && problem.batch_invariant) {
    return Support::no("splits is " + std::to_string(splits) + "; batch_invariant keeps one part per sequence");
  }
  const FwdConfig config = config_of(problem, target, splits, wishes);
  if (const Support s = exists(config, target, wishes); !s) return s;
  if (problem.list && list_cells(config, problem) > FwdConfig::kMostCells) {
    return Support::no("collects at most " + std::to_string(FwdConfig::kMostCells) + " runs of " +
                       std::to_string(config.run) + " keys; the list's problem has " +
                       std::to_string(list_cells(config, problem)));
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

/// What every run of a plan launches.
struct FwdLaunch {
  FwdConfig config;
  int packed_heads;
  Dim3 grid;
  Dim3 block;
  std::size_t shared_bytes;  // of a block
};

FwdLaunch launch_of(const Problem& problem, const FwdConfig& config, std::int64_t splits) {
  const std::int64_t heads = packed_heads(problem);
  return {config,
          static_cast<int>(heads),
          {static_cast<std::uint32_t>(row_blocks(problem, config)), static_cast<std::uint32_t>(problem.heads_q / heads),
           static_cast<std::uint32_t>(problem.batch * splits)},
          {static_cast<std::uint32_t>(config.threads())},
          static_cast<std::size_t>(shared_bytes(config, problem))};
}

void plan(detail::PlanState& state) {
  const Problem& problem = state.problem;
  state.splits = choose_splits(problem, state.target, state.wishes);
  const FwdConfig config = config_of(problem, state.target, state.splits, state.wishes);
  const FwdLaunch launch = launch_of(problem, config, state.splits);
  state.prepared = launch;
  state.tile_q = config.tile_m;
  state.tile_kv = config.tile_n;
  state.kernels = {fwd_mma_source(config, callable_sources(problem))};
  state.choice = "kernel: " + state.kernels.front().name + "\nshared memory: " + std::to_string(launch.shared_bytes) +
                 " bytes a block of " + std::to_string(launch.block.x) + " threads\n";
  if (state.splits > 1) {
    state.kernels.push_back(source_of(CombineConfig{Element::fp32, element_of(problem.o_type)}));
    state.choice +=
        "splits: " + std::to_string(state.splits) + " parts of the keys, then " + state.kernels.back().name + "\n";
  }
  state.workspace_bytes = partials_bytes(problem, state.splits);
  if (!gathers_mass(problem)) return;
  state.workspace_bytes += mass_bytes(problem);
  for (const KernelSource& source : mass_sources(config, problem)) {
    state.kernels.push_back(source);
    state.choice += "then " + source.name + "\n";
  }
}

void check_row_stride(Slot slot, const Tensor& tensor) {
  if (!tensor) return;
  const std::int64_t stride = tensor.strides[static_cast<std::size_t>(tensor.rank - 3)];
  if (stride < kMostRowStride) return;
  throw Error(ErrorCode::unsupported, std::string(to_string(slot)),
              "a stride of " + std::to_string(stride) + " elements between rows",
              "less than " + std::to_string(kMostRowStride) + " on cuda");
}

KvMaps kv_maps(const FwdConfig& config, const Problem& problem, const FwdParams& params) {
  const KvParams& kv = params.kv[0];
  const std::int64_t rows = kv.cu_seqlens != nullptr ? kv.total : kv.capacity;
  const auto map = [&](const void* tensor, const Strides& strides, std::int64_t dim, int padded) {
    return tensor_map(tensor, strides, dim, rows, problem.heads_kv, problem.batch, config.tile_n,
                      padded % 64 == 0 ? 64 : 32);
  };
  return {map(kv.k, kv.k_strides, params.d, config.d), map(kv.v, kv.v_strides, params.dv, config.dv)};
}

void run(const detail::PlanState& state, const Bindings& bindings, const detail::Resources& resources) {
  const Problem& problem = state.problem;
  for (const Slot slot : {Slot::q, Slot::o, Slot::k, Slot::v, Slot::k2, Slot::v2}) {
    check_row_stride(slot, bindings[slot]);
  }
  if (problem.seqlen_q == 0 || problem.batch == 0) return;
  const auto& launch = std::any_cast<const FwdLaunch&>(state.prepared);
  const FwdConfig& config = launch.config;
  FwdParams params = fwd_params(problem, bindings, launch.packed_heads);
  if (problem.list) params.list = list_params(config, problem, bindings);
  std::byte* masses = resources.workspace + partials_bytes(problem, state.splits);
  if (gathers_mass(problem)) keep_lse(params, problem, masses);
  const FwdParams whole = params;
  CombineParams merge{};
  if (state.splits > 1) {
    merge = redirect_to(Partials(problem, state.splits), resources.workspace, problem, params);
  }
  KvMaps maps{};
  if (config.loader == Loader::tma) maps = kv_maps(config, problem, params);
  void* parameters[] = {&params, &maps};
  resources.kernels.front()->launch(launch.grid, launch.block, launch.shared_bytes, resources.stream.handle,
                                    parameters);
  if (state.splits > 1) launch_combine(*resources.kernels[1], merge, problem.batch, problem.seqlen_q, resources.stream);
  if (gathers_mass(problem)) {
    launch_mass(config, whole, problem, bindings, masses, resources.kernels.last(2), resources.stream);
  }
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera::detail {

const Implementation kCudaFwdMma = {"cuda.fwd_mma", cuda::supports, cuda::plan, cuda::run};

}  // namespace tessera::detail
