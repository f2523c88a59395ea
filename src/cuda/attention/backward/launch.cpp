// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/launch.h"

#include <algorithm>
#include <limits>

#include "bindings/slot_rules.h"
#include "cuda/attention/backward/config.h"
#include "cuda/attention/backward/kernel_source.h"
#include "cuda/attention/backward/lists/list_bits.h"
#include "cuda/attention/backward/tensor_maps.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/masks/mask_tiles.h"
#include "cuda/attention/params.h"
#include "cuda/jit/kernel.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostGrid = 65535;  // blocks in y and z
constexpr std::int64_t kMostBlocks = std::numeric_limits<int>::max();

/// What every run of a plan launches.
struct BwdLaunch {
  Problem problem;  // including the list that an earlier kernel makes of its mask, if any
  BwdConfig rows;   // the row pass; unused if the key pass computes all gradients
  BwdConfig keys;
  RowValuesConfig values;
  std::int64_t row_part_tiles;  // tiles of rows in a part (RowParts); 0: there are no parts
  MaskTiles mask;
  std::size_t mask_at = 0;  // offset in the workspace of what the mask's kernel writes

  bool finds_all() const { return keys.adds_dq(); }
};

std::int64_t tiles_of(std::int64_t length, int tile) { return (length + tile - 1) / tile; }
std::int64_t total_rows(const Problem& p) { return p.q_layout == Layout::varlen ? p.total_q : p.batch * p.seqlen_q; }
// Blocks of FindRowValues for a head and sequence. If they also clear the sums of dQ, they cover whole tiles of
// kSumRows.
std::int64_t value_blocks(const Problem& p, const RowValuesConfig& c) {
  if (c.cleared_rows == 0) return tiles_of(p.seqlen_q, c.rows());
  return tiles_of(p.seqlen_q, kSumRows) * (kSumRows / c.rows());
}
// Tiles of sums of dQ for heads_a_tile heads. sum_tile_of() in query_sums.cuh explains why packed sequences have more.
std::int64_t sum_tiles(const Problem& p, const BwdConfig& c) {
  const int queries = kSumRows / c.heads_a_tile;
  return p.q_layout == Layout::varlen ? p.total_q / queries + p.batch : p.batch * tiles_of(p.seqlen_q, queries);
}
std::int64_t row_blocks(const Problem& p, const BwdConfig& c) {
  return tiles_of(p.seqlen_q, c.tile_queries()) * (p.heads_q / c.heads_a_tile) * p.batch;
}
std::int64_t key_tiles(const Problem& p, const BwdConfig& c) {
  return tiles_of(p.kv.seqlen, c.tile_kv) + (p.kv2 ? tiles_of(p.kv2->seqlen, c.tile_kv) : 0);
}
std::int64_t key_blocks(const Problem& p, const BwdConfig& c) {
  return key_tiles(p, c) * p.heads_kv * p.batch * (c.apart ? 2 : 1);
}
std::int64_t row_part_count(const Problem& p, const BwdLaunch& launch) {
  return launch.row_part_tiles > 0 ? divide_up(tiles_of(p.seqlen_q, launch.keys.tile_q), launch.row_part_tiles) : 1;
}
// RowParts::tiles; 0 if each tile of keys has one block.
std::int64_t tiles_of_row_part(const detail::PlanState& state, const Problem& problem, const BwdConfig& keys) {
  const std::int64_t parts = state.wishes.splits.value_or(choose_row_parts(problem, keys, state.target));
  const std::int64_t tiles = tiles_of(problem.seqlen_q, keys.tile_q);
  const std::int64_t part = divide_up(tiles, parts);
  return part < tiles ? part : 0;
}

// Floats of the dK and dV that a part writes to memory.
std::int64_t part_floats(const BwdConfig& c) { return std::int64_t{c.tile_kv} * (c.d + c.dv); }
// The most parts of tiles of keys (KeyParts). At 4096, a part has at most 1/2048 of all listed tiles, or kLeastPart of
// them (SplitKeys). 1/2048 is an eighth of the share of a block if 264 blocks run side by side. The sums of parts take
// at most the memory of those of dQ, or of 64 parts.
std::int64_t most_key_parts(const Problem& p, const BwdConfig& c) {
  if (!c.has_parts()) return 0;
  constexpr std::int64_t kMostParts = 4096;
  const std::int64_t all = 2 * tiles_of(key_tiles(p, c) * row_blocks(p, c), kLeastPart);
  const std::int64_t as_long_as_sums = p.heads_q / c.heads_a_tile * sum_tiles(p, c) * kSumRows * c.d / part_floats(c);
  return std::min({kMostParts, all, std::max<std::int64_t>(as_long_as_sums, 64)});
}

Support supports_wishes(const Wishes& wishes) {
  const struct {
    const char* name;
    bool wished;
  } all[] = {{"tile_q", wishes.tile_q.has_value()},
             {"tile_kv", wishes.tile_kv.has_value()},
             {"stages", wishes.stages.has_value()},
             {"warps", wishes.warps.has_value()},
             {"loader", !wishes.loader.empty()}};
  for (const auto& wish : all) {
    if (wish.wished) return Support::no(std::string(wish.name) + " cannot be wished for in the backward");
  }
  return Support::yes();
}

/// Offsets in the workspace, in bytes. The sums of dQ are at its beginning.
struct Workspace {
  std::int64_t array;                                                           // floats of an array of RowValues
  std::size_t added = 0, values = 0, parts, bits, key_parts, part_sums, bytes;  // bits: TileBits, or RowParts::done
  std::int64_t row_bits, key_bits;                                              // words of TileBits of either pass

  Workspace(const Problem& p, const BwdLaunch& launch) : array(p.heads_q * total_rows(p)) {
    const std::int64_t tiles = p.heads_q / launch.keys.heads_a_tile * sum_tiles(p, launch.keys);
    if (launch.finds_all()) added = static_cast<std::size_t>(tiles * kSumRows * launch.keys.d) * 4;
    values = added + (launch.keys.ordered ? static_cast<std::size_t>(tiles_of(tiles, 4)) * 16 : 0);
    parts = values + static_cast<std::size_t>((p.sink ? 3 : 2) * array) * 4;
    const std::int64_t count = p.sink ? p.heads_q * p.batch * value_blocks(p, launch.values) : 0;
    bits = parts + static_cast<std::size_t>(count) * 4;
    row_bits = launch.finds_all() ? 0 : bit_count(p, launch.rows);
    key_bits = bit_count(p, launch.keys);
    const std::int64_t shared_tiles = launch.keys.splits_rows ? key_blocks(p, launch.keys) : 0;
    key_parts = bits + static_cast<std::size_t>(row_bits + key_bits + shared_tiles) * 4;
    const std::int64_t most = most_key_parts(p, launch.keys);
    // Each part has a KeyPart and a count. The count of all parts and a flag for each tile of keys follow.
    const std::int64_t of_each = static_cast<std::int64_t>(sizeof(KeyPart) + sizeof(int));
    const std::int64_t all = most > 0 ? most * of_each + std::int64_t{sizeof(int)} + key_blocks(p, launch.keys) : 0;
    part_sums = key_parts + static_cast<std::size_t>(tiles_of(all, 16)) * 16;
    const std::int64_t sums = most + shared_tiles * row_part_count(p, launch);
    bytes = part_sums + static_cast<std::size_t>(sums * part_floats(launch.keys)) * 4;
  }
};

}  // namespace

Support supports_features(const Problem& p) {
  if (p.q_type != p.k_type || p.q_type != p.v_type || (p.q_type != DType::bf16 && p.q_type != DType::fp16)) {
    return Support::no("wants q, k and v of one type, bf16 or fp16");
  }
  if (p.o_type != p.q_type) return Support::no("wants o and dout in q's type");
  if (std::max(p.head_dim_qk, p.head_dim_v) > 256) return Support::no("wants head dims of at most 256");
  return has_callables(p);
}

Support supports_backward(const Problem& given, const Target& target, const Wishes& wishes, Products products) {
  if (const Support s = supports_features(given); !s) return s;
  if (const Support s = supports_wishes(wishes); !s) return s;
  const Problem problem = with_mask_list(given, wishes);
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 2;
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  if (problem.seqlen_q * group > most || problem.kv.seqlen > most || problem.total_q > most ||
      problem.kv.total > most || (problem.kv2 && std::max(problem.kv2->seqlen, problem.kv2->total) > most)) {
    return Support::no("counts rows of a sequence in 32 bits");
  }
  if (problem.batch > kMostGrid || problem.heads_q > kMostGrid) {
    return Support::no("wants at most 65535 sequences and heads");
  }
  const bool all = finds_all(problem, target, products);
  if (wishes.splits && *wishes.splits != 1 &&
      !(all && bwd_config(problem, target, products, Gradients::all).may_split_rows())) {
    return Support::no("splits cannot be wished for here, where no blocks share the rows");
  }
  if (problem.batch_invariant && wishes.splits.value_or(1) != 1) {
    return Support::no("splits is " + std::to_string(*wishes.splits) + "; batch_invariant keeps one part of the rows");
  }
  for (const Gradients of : {Gradients::queries, all ? Gradients::all : Gradients::keys}) {
    const BwdConfig config = bwd_config(problem, target, products, of);
    if (config.smem_bytes() > target.shared_memory) {
      return Support::no("needs " + std::to_string(config.smem_bytes()) + " bytes of shared memory; the target has " +
                         std::to_string(target.shared_memory));
    }
    const std::int64_t parts = of == Gradients::queries ? 1 : wishes.splits.value_or(1);
    const std::int64_t blocks =
        of == Gradients::queries ? row_blocks(problem, config) : key_blocks(problem, config) * parts;
    if (blocks > kMostBlocks) return Support::no("needs " + std::to_string(blocks) + " blocks; want at most 2^31 - 1");
  }
  return Support::yes();
}

void plan_backward(detail::PlanState& state, Products products) {
  const Problem problem = with_mask_list(state.problem, state.wishes);
  const bool all = finds_all(problem, state.target, products);
  BwdConfig keys = bwd_config(problem, state.target, products, all ? Gradients::all : Gradients::keys);
  const std::int64_t row_part_tiles = tiles_of_row_part(state, problem, keys);
  keys.splits_rows = row_part_tiles > 0;
  BwdLaunch launch{
      problem,        bwd_config(problem, state.target, products, Gradients::queries),
      keys,           row_values_config(problem, keys),
      row_part_tiles, MaskTiles(problem, state.problem, keys.mask_bits ? MaskBitsOf::keys : MaskBitsOf::nothing)};
  const CallableSources callables = callable_sources(problem);
  CallableSources of_keys = callables;
  if (keys.mask_bits) of_keys.mask = {};
  state.splits = row_part_count(problem, launch);
  state.fixed_order = !all || launch.keys.ordered;
  state.tile_q = all ? launch.keys.tile_q : launch.rows.tile_q;
  state.tile_kv = all ? launch.keys.tile_kv : launch.rows.tile_kv;
  state.kernels = {row_values_source(launch.values)};
  if (launch.mask) state.kernels.push_back(launch.mask.source(problem));
  if (launch.keys.has_list()) state.kernels.push_back(mark_tiles_source());
  if (launch.keys.has_parts()) state.kernels.push_back(split_keys_source());
  if (!all) state.kernels.push_back(bwd_source(launch.rows, callables));
  state.kernels.push_back(bwd_source(launch.keys, of_keys));
  if (all)
    state.kernels.push_back(query_sums_source({launch.keys.gradient, launch.keys.d, launch.keys.ordered,
                                               launch.keys.has_producer(), launch.keys.heads_a_tile}));
  if (problem.sink) state.kernels.push_back(sum_sinks_source());
  for (const KernelSource& source : state.kernels) {
    state.choice += (state.choice.empty() ? "kernel: " : "then ") + source.name + "\n";
  }
  state.workspace_bytes = Workspace(problem, launch).bytes;
  if (launch.mask) {
    launch.mask_at = round_up<std::size_t>(state.workspace_bytes, 16);
    state.workspace_bytes = launch.mask_at + launch.mask.bytes();
  }
  state.prepared = std::move(launch);
}

namespace {

BwdParams bwd_params(const Problem& problem, const Bindings& bindings, const BwdLaunch& launch, int multiprocessors,
                     std::byte* workspace) {
  BwdParams p{};
  p.forward = fwd_params(problem, bindings, 1);
  p.forward.schedule = tile_schedule(launch.rows.as_forward(), problem, 1, 1);
  p.dout = bindings[Slot::dout].bytes();
  p.dout_strides = row_strides(bindings[Slot::dout]);
  if (bindings[Slot::dlse]) p.dlse = bindings[Slot::dlse].as<float>();
  p.dlse_strides = lse_strides(bindings[Slot::dlse]);
  p.dq = bindings[Slot::dq].bytes();
  p.dq_strides = row_strides(bindings[Slot::dq]);
  for (const bool second : {false, true}) {
    if (second && !problem.kv2) continue;
    const detail::SourceSlots& slots = detail::source_slots(second);
    p.dk[second ? 1 : 0] = {bindings[slots.dk].bytes(), row_strides(bindings[slots.dk])};
    p.dv[second ? 1 : 0] = {bindings[slots.dv].bytes(), row_strides(bindings[slots.dv])};
  }
  const std::int64_t rows = total_rows(problem);
  const Workspace place(problem, launch);
  float* values = reinterpret_cast<float*>(workspace + place.values);
  const std::int64_t array = place.array;
  p.values = {values, values + array, problem.sink ? values + 2 * array : nullptr, rows};
  if (problem.sink) {
    p.dsink = bindings[Slot::dsink].as<float>();
    p.dsink_stride = bindings[Slot::dsink].strides[0];
    p.dsink_parts = reinterpret_cast<float*>(workspace + place.parts);
    p.dsink_part_count = static_cast<int>(problem.batch * value_blocks(problem, launch.values));
  }
  if (launch.keys.has_list()) {
    if (!launch.mask.makes_list()) p.forward.list = bwd_list_params(problem, bindings);
    if (launch.mask) launch.mask.complete(p.forward.list, workspace + launch.mask_at);
    p.cleared_words = reinterpret_cast<u32*>(workspace + place.bits);
    p.cleared_count = place.row_bits + place.key_bits;
    if (!launch.finds_all()) p.tile_bits[0] = tile_bits(problem, launch.rows, p.cleared_words);
    p.tile_bits[1] = tile_bits(problem, launch.keys, p.cleared_words + place.row_bits);
    p.list_rows = static_cast<int>(list_rows(problem));
  }
  if (const std::int64_t most = most_key_parts(problem, launch.keys); most > 0) {
    auto* parts = reinterpret_cast<KeyPart*>(workspace + place.key_parts);
    int* count = reinterpret_cast<int*>(parts + most);
    p.key_parts = {.parts = parts,
                   .most = static_cast<int>(most),
                   .count = count,
                   .done = count + 1,
                   .is_split = reinterpret_cast<bool*>(count + 1 + most),
                   .tiles = static_cast<int>(key_blocks(problem, launch.keys)),
                   .walks = static_cast<int>(problem.heads_q / problem.heads_kv / launch.keys.heads_a_tile),
                   .sums = reinterpret_cast<float*>(workspace + place.part_sums)};
  }
  if (launch.keys.splits_rows) {
    p.cleared_words = reinterpret_cast<u32*>(workspace + place.bits);
    p.cleared_count = key_blocks(problem, launch.keys);
    p.row_parts = {.key_blocks = Divisor(static_cast<int>(std::max<std::int64_t>(p.cleared_count, 1))),
                   .tiles = static_cast<int>(launch.row_part_tiles),
                   .parts = static_cast<int>(row_part_count(problem, launch)),
                   .done = reinterpret_cast<int*>(p.cleared_words),
                   .sums = reinterpret_cast<float*>(workspace + place.part_sums)};
  }
  p.kv_heads = Divisor(static_cast<int>(problem.heads_kv));
  p.twice_heads = Divisor(static_cast<int>(2 * std::max<std::int64_t>(problem.heads_q / problem.heads_kv, 1)));
  p.first_tiles = static_cast<int>(tiles_of(problem.kv.seqlen, launch.keys.tile_kv));
  if (launch.finds_all()) {
    int* added = launch.keys.ordered ? reinterpret_cast<int*>(workspace + place.added) : nullptr;
    p.query_sums = {reinterpret_cast<float*>(workspace), sum_tiles(problem, launch.keys), launch.keys.d, added};
  }
  const std::int64_t tiles = std::max<std::int64_t>(key_tiles(problem, launch.keys), 1);
  const std::int64_t l2_heads = key_l2_heads(problem, launch.keys, tiles, multiprocessors);
  p.key_l2_heads = Divisor(static_cast<int>(l2_heads));
  p.key_l2_blocks = Divisor(static_cast<int>(tiles * l2_heads));
  p.wave_blocks = Divisor(multiprocessors);
  p.accumulates = problem.accumulate;
  return p;
}

}  // namespace

void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  constexpr Slot kSlots[] = {Slot::q, Slot::o, Slot::o_residual, Slot::dout, Slot::dq,
                             Slot::k, Slot::v, Slot::k2,         Slot::v2};
  check_row_strides(bindings, kSlots);
  const auto& launch = std::any_cast<const BwdLaunch&>(state.prepared);
  const Problem& problem = launch.problem;
  ResidualBwdParams params{
      bwd_params(problem, bindings, launch, state.target.multiprocessors, resources.workspace), nullptr, {}};
  if (problem.residual) {
    params.o_residual = bindings[Slot::o_residual].as<signed char>();
    params.o_residual_strides = row_strides(bindings[Slot::o_residual]);
  }
  // Packed sequences may all be empty although q has rows.
  const bool no_rows = total_rows(problem) == 0 || problem.seqlen_q == 0;
  BwdTensorMaps maps[2]{};  // before the first launch, because it throws if the strides do not suit TMA
  if (launch.keys.has_producer() && !no_rows) {
    if (!launch.finds_all()) maps[0] = tensor_maps(launch.rows, problem, params);
    maps[1] = tensor_maps(launch.keys, problem, params);
  }
  const auto start = [&](std::size_t kernel, Dim3 grid, int threads, int shared_bytes, BwdTensorMaps* map = nullptr,
                         Begins begins = Begins::early) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    void* parameters[] = {&params, map};
    resources.kernels[kernel]->launch(grid, {static_cast<std::uint32_t>(threads)},
                                      static_cast<std::size_t>(shared_bytes), resources.stream.handle, parameters,
                                      begins);
  };
  const auto start_pass = [&](std::size_t kernel, const BwdConfig& config, std::int64_t blocks, BwdTensorMaps& map) {
    // The key pass relies on the row pass to wait for the kernels before both (PassOverlap). Without rows there is no
    // row pass.
    const Begins begins = config.of == Gradients::keys && no_rows ? Begins::behind : Begins::early;
    start(kernel, {static_cast<std::uint32_t>(blocks)}, config.block_threads(), config.smem_bytes(), &map, begins);
  };
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  if (no_rows) {
    params.dsink_part_count = 0;
    params.key_parts = {};
  }
  std::size_t next = 0;
  if (!no_rows) {
    start(next, {count(value_blocks(problem, launch.values)), count(problem.heads_q), count(problem.batch)},
          RowValuesConfig::threads(), 0);
  }
  ++next;
  if (launch.mask) {
    if (!no_rows) {
      launch.mask.launch(*resources.kernels[next], params.forward, resources.workspace + launch.mask_at,
                         resources.stream);
    }
    ++next;
  }
  if (launch.keys.has_list()) {
    if (!no_rows) {
      start(next,
            {count(tiles_of(list_rows(problem), kMarkedRows)), count(problem.list_heads(backward_list(problem))),
             count(list_batches(problem))},
            kMarkedRows * 32, 0);
    }
    ++next;
  }
  if (launch.keys.has_parts()) {
    if (params.key_parts.most > 0) start(next, {1}, kSplitThreads, 0);
    ++next;
  }
  if (!launch.finds_all()) {
    if (!no_rows) start_pass(next, launch.rows, row_blocks(problem, launch.rows), maps[0]);
    ++next;
  }
  const std::int64_t blocks = key_blocks(problem, launch.keys) * row_part_count(problem, launch);
  start_pass(next++, launch.keys, blocks + params.key_parts.most, maps[1]);
  if (launch.finds_all()) {
    if (!no_rows) {
      const int heads = launch.keys.heads_a_tile;
      start(next,
            {count(tiles_of(problem.seqlen_q, kSumRows / heads)), count(problem.heads_q / heads), count(problem.batch)},
            QuerySumsConfig::threads(), 0);
    }
    ++next;
  }
  if (problem.sink) start(next, {count(problem.heads_q)}, 256, 0);
}

}  // namespace tessera::cuda
