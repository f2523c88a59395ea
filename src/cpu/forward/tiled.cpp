// SPDX-License-Identifier: Apache-2.0
// The implementation cpu.tiled: what it supports and how it cuts a problem into tiles.
#include <algorithm>

#include "base/element.h"
#include "cpu/scores/lane_program.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/dot_keys.h"
#include "cpu/tiles/tiling.h"

namespace tessera::cpu {
namespace {

// These tiles were the fastest over the rows of bench/suites/cpu_dense.txt; docs/experiments/cpu-forward.md lists
// slower ones.

// The least size of a thread's Q and O panels. Tiles are halved down to it while threads would lack work.
constexpr std::int64_t kLeastQueryBytes = 128 * 1024;
// With a list each block uses few of the keys, so more rows share them (measured on a 2-core Zen 5).
constexpr std::int64_t kListedBytes = 2048 * 1024;
constexpr std::int64_t kLeastListedBytes = 512 * 1024;
// The most bytes of row sums for the blocks that walk the keys together, if masses are gathered.
constexpr std::int64_t kMassBytes = 4096 * 1024;
constexpr std::int64_t kPanels = 32;  // at most, for short rows
constexpr std::int64_t kBackwardQueries = 64;
constexpr std::int64_t kBackwardKeys = 128;
// With dot-product instructions the products are cheap, but the work around them is not: dK and dV pass through L2 once
// for 128 queries, and a tile of queries is transposed once for 256 keys.
constexpr std::int64_t kBackwardDotQueries = 128;
constexpr std::int64_t kBackwardDotKeys = 256;
// Bytes of the rows of K that the heads of a decode unit read in turn. As many are prefetched meanwhile, and both fit
// in L2.
constexpr std::int64_t kDecodeBytes = 256 * 1024;
// Units per thread: there are several, so that a slower core can take fewer.
constexpr std::int64_t kDecodeUnits = 4;
constexpr std::int64_t kLongestTile = 4096;  // a wish beyond this would only waste memory

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_paged(const KvSource& source) {
  return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
}

std::int64_t mass_bytes(const Problem& problem, std::int64_t columns) {
  return 2 * problem.key_blocks() * columns * static_cast<std::int64_t>(sizeof(float));
}

Support supports_wishes(const Problem& problem, const Wishes& wishes) {
  const auto tile = [](const char* name, std::optional<std::int64_t> wish) {
    if (!wish || (*wish >= 1 && *wish <= kLongestTile)) return Support::yes();
    return Support::no(std::string(name) + " is " + std::to_string(*wish) + "; want 1 to " +
                       std::to_string(kLongestTile));
  };
  if (Support s = tile("tile_q", wishes.tile_q); !s) return s;
  if (Support s = tile("tile_kv", wishes.tile_kv); !s) return s;
  if (!wishes.splits) return Support::yes();
  if (*wishes.splits < 1 || *wishes.splits > 1024) {
    return Support::no("splits is " + std::to_string(*wishes.splits) + "; want 1 to 1024");
  }
  if (*wishes.splits > 1 && problem.batch_invariant) {
    return Support::no("splits is " + std::to_string(*wishes.splits) + "; batch_invariant keeps one part per sequence");
  }
  if (*wishes.splits > 1 && problem.pass == Pass::forward && gathers_mass(problem)) {
    return Support::no("splits is " + std::to_string(*wishes.splits) +
                       "; masses, next lists and skip states need whole rows");
  }
  return Support::yes();
}

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& wishes) {
  if (problem.pass == Pass::backward) {
    if (is_paged(problem.kv) || (problem.kv2 && is_paged(*problem.kv2))) {
      return Support::no("paged keys have no gradient: a page may belong to several sequences");
    }
    if (gathers_mass(problem)) return Support::no("mass and next lists are outputs of the forward");
  }
  return supports_wishes(problem, wishes);
}

// Several head tiles share a unit only if queries are few. With a list each head has its own keys.
std::int64_t most_tiles_a_unit(const detail::PlanState& state, const Tiling& tiling) {
  const Problem& problem = state.problem;
  if (!tiling.all_decode || problem.list) return 1;
  const std::int64_t row =
      std::max<std::int64_t>(problem.head_dim_qk, 1) * static_cast<std::int64_t>(size_of(problem.k_type));
  return std::clamp<std::int64_t>(kDecodeBytes / (kDecodeKeys * row), 1, tiling.head_tiles);
}

// Heads of a group share a tile of K and V unless something is decided per query head.
bool shares_group(const Problem& problem) {
  return problem.group() > 1 && !gathers_mass(problem) && problem.mask.empty() &&
         !(problem.list && problem.list.heads == TileList::Heads::q);
}

// Long query tiles spread the cost of loading keys over more queries. Results do not depend on their length.
std::int64_t forward_queries(detail::PlanState state, const ForwardTiles& tiles) {
  const std::int64_t row =
      (state.problem.head_dim_qk + state.problem.head_dim_v) * static_cast<std::int64_t>(sizeof(float));
  const auto rows_of = [&](std::int64_t bytes, std::int64_t least, std::int64_t most) {
    return std::clamp<std::int64_t>(bytes / row / kPanel, least, most) * kPanel;
  };
  const bool listed(state.problem.list);
  const std::int64_t least = rows_of(listed ? kLeastListedBytes : kLeastQueryBytes, 1, kPanels / 4);
  state.tile_q = rows_of(listed ? kListedBytes : tiles.query_bytes, 4, kPanels);
  for (; state.tile_q > least; state.tile_q /= 2) {
    const Tiling tiling = tiling_of(state);
    if (tiling.row_units * tiling.head_tiles * state.problem.batch >= 4 * state.target.threads) break;
  }
  return state.tile_q;
}

std::int64_t forward_splits(const detail::PlanState& state) {
  const Problem& problem = state.problem;
  if (state.wishes.splits) return *state.wishes.splits;
  if (problem.batch_invariant || gathers_mass(problem)) return 1;
  const Tiling tiling = tiling_of(state);
  const std::int64_t threads = state.target.threads;
  const std::int64_t together = most_tiles_a_unit(state, tiling);
  const std::int64_t units = tiling.row_units * divide_up(tiling.head_tiles, together) * problem.batch;
  const std::int64_t wanted = together > 1 && threads > 1 ? kDecodeUnits * threads : threads;
  if (units == 0 || units >= wanted) return 1;
  // A part shorter than four tiles costs more in the merge than it gains.
  return std::clamp<std::int64_t>(divide_up(wanted, units), 1, std::max<std::int64_t>(tiling.key_tiles / 4, 1));
}

std::int64_t backward_parts(const detail::PlanState& state) {
  const Problem& problem = state.problem;
  if (state.wishes.splits) return *state.wishes.splits;
  const std::int64_t units = problem.batch * problem.heads_kv;
  if (problem.batch_invariant || units == 0 || units >= state.target.threads) return 1;
  const std::int64_t keys = most_keys(problem);
  return std::clamp<std::int64_t>(divide_up(state.target.threads, units), 1,
                                  std::max<std::int64_t>(divide_up(keys, state.tile_kv), 1));
}

// Under a window most of a long tile would be hidden.
std::int64_t forward_keys(const Problem& problem, const ForwardTiles& tiles) {
  return problem.window.left ? kFloatTiles.keys : tiles.keys;
}

std::int64_t backward_keys(const Problem& problem, bool dots) {
  const bool listed = problem.list || problem.bwd_list;
  // A tile of one listed block wastes nothing; small blocks are masked within a larger tile.
  return listed && problem.block_kv >= 32 && problem.block_kv <= 256 ? problem.block_kv
         : dots                                                      ? kBackwardDotKeys
                                                                     : kBackwardKeys;
}

void plan(detail::PlanState& state) {
  const Problem& problem = state.problem;
  const bool forward = problem.pass == Pass::forward;
  const Kernels& kernels = kernels_for(state.target.isa);
  const bool dots = uses_dots(problem, kernels);
  const ForwardTiles& tiles = dots ? kernels.dots->forward : kFloatTiles;
  state.shared_group = forward && shares_group(problem);
  state.splits = 1;
  state.tile_kv = state.wishes.tile_kv.value_or(forward ? forward_keys(problem, tiles) : backward_keys(problem, dots));
  state.tile_q = state.wishes.tile_q.value_or(forward ? forward_queries(state, tiles)
                                              : dots  ? kBackwardDotQueries
                                                      : kBackwardQueries);
  state.splits = forward ? forward_splits(state) : backward_parts(state);
  state.workspace_bytes = forward ? forward_workspace(state) : backward_workspace(state);
  const auto line = [&](const std::string& text) { state.choice += text + "\n"; };
  const char* own = " (measured best)";
  line("tile_q: " + std::to_string(state.tile_q) + (state.wishes.tile_q ? " (wish)" : own));
  line("tile_kv: " + std::to_string(state.tile_kv) + (state.wishes.tile_kv ? " (wish)" : own));
  line("splits: " + std::to_string(state.splits) +
       (state.wishes.splits ? " (wish)"
        : state.splits > 1  ? " (fewer units of work than wanted)"
                            : " (enough units of work)"));
  line(std::string("group: ") +
       (state.shared_group ? "the heads of a group share each tile of K and V" : "one head at a time"));
  if (const Tiling tiling = tiling_of(state); forward && tiling.all_decode) {
    line("few queries: keys are read where they lie; key heads together: " + std::to_string(tiling.tiles_a_unit));
  }
  state.choice += element_calls(state.callables);
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  if (state.problem.pass == Pass::forward) {
    run_forward(state, bindings, resources);
  } else {
    run_backward(state, bindings, resources);
  }
}

}  // namespace

Tiling tiling_of(const detail::PlanState& state) {
  const Problem& problem = state.problem;
  Tiling t{};
  t.heads_a_tile = state.shared_group ? problem.group() : 1;
  t.head_tiles = problem.heads_q / t.heads_a_tile;
  const bool mass = gathers_mass(problem);
  const std::int64_t queries = most_queries(problem);
  const std::int64_t fitting = std::max<std::int64_t>(state.tile_q / t.heads_a_tile, 1);
  t.rows = std::min(fitting, std::max<std::int64_t>(queries, 1));
  t.block_rows = problem.list || mass ? problem.block_q : t.rows;
  t.rows = std::min(t.rows, t.block_rows);
  t.block_strips = divide_up(t.block_rows, t.rows);
  t.strip_columns = divide_up(t.rows * t.heads_a_tile, kPanel) * kPanel;
  t.strips = problem.list && (!mass || t.block_strips == 1) ? state.tile_q / t.strip_columns : 1;
  if (mass && t.strips > 1)
    t.strips = std::min(t.strips, kMassBytes / std::max<std::int64_t>(mass_bytes(problem, t.strip_columns), 1));
  t.strips = std::max<std::int64_t>(t.strips, 1);
  t.unit_strips = mass ? std::max(t.block_strips, t.strips) : t.strips;
  t.row_units = divide_up(divide_up(queries, t.block_rows) * t.block_strips, t.unit_strips);
  t.splits = state.splits;
  t.tile_kv = state.tile_kv;
  t.key_tiles = divide_up(most_keys(problem), t.tile_kv);
  t.key_tiles_a_split = std::max<std::int64_t>(divide_up(t.key_tiles, t.splits), 1);
  t.all_decode = reads_in_place(state) && t.rows * t.heads_a_tile <= kDecodeQueries;
  // A unit has as many head tiles as possible, as long as each thread gets a unit.
  const std::int64_t tiles = t.head_tiles * problem.batch * t.splits / std::max(state.target.threads, 1);
  t.tiles_a_unit = std::clamp<std::int64_t>(tiles, 1, most_tiles_a_unit(state, t));
  t.head_units = divide_up(t.head_tiles, t.tiles_a_unit);
  return t;
}

bool reads_in_place(const detail::PlanState& state) {
  const Problem& p = state.problem;
  const bool dots = uses_dots(p, kernels_for(state.target.isa));
  if (detail::is_quantised(p.k_type)) return false;
  return p.pass == Pass::forward && p.mask.empty() && p.dropout <= 0.0F && !gathers_mass(p) &&
         p.head_dim_qk % (dots ? kDotStep : kPad) == 0 && p.head_dim_v % kPad == 0;
}

std::int64_t total_rows(const Problem& problem) {
  return problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
}

std::int64_t most_queries(const Problem& problem) {
  return problem.q_layout == Layout::varlen ? std::min(problem.seqlen_q, problem.total_q) : problem.seqlen_q;
}

std::int64_t most_keys(const Problem& problem) {
  const auto most = [](const KvSource& source) {
    return source.layout == KvLayout::varlen ? std::min(source.seqlen, source.total) : source.seqlen;
  };
  return most(problem.kv) + (problem.kv2 ? most(*problem.kv2) : 0);
}

const Implementation kTiled = {{"cpu.tiled", DeviceType::cpu, Operation::attention, supports, plan}, run};

}  // namespace tessera::cpu
