// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/tiles/list_params.h"

#include <algorithm>
#include <limits>

namespace tessera::cuda {
namespace {

constexpr std::int64_t kLongestBlock = std::numeric_limits<int>::max() / 2;

std::int64_t largest_power_of_two_in(std::int64_t x) { return x & -x; }

Divisor block_size(std::int64_t block) { return Divisor(static_cast<int>(std::min(block, kLongestBlock))); }

void copy_strides(i64 (&to)[3], const Tensor& tensor, const TileList& list) {
  to[0] = list.per_batch ? tensor.strides[0] : 0;
  to[1] = list.heads == TileList::Heads::one ? 0 : tensor.strides[1];
  to[2] = tensor.strides[2];
}

TileTable table_of(const TileList& list, const Tensor& counts, const Tensor& indices, const Tensor& bits) {
  TileTable table{};
  const Tensor& entries = list.form == TileList::Form::bitmask ? bits : indices;
  table.entries = entries.bytes();
  copy_strides(table.entry_strides, entries, list);
  table.capacity = reachable(entries.shape[3]);
  if (list.form == TileList::Form::bitmask) return table;
  table.counts = counts.as<int>();
  copy_strides(table.count_strides, counts, list);
  return table;
}

// The rows of a tile that owns a row of a skip state's list: those of a query block.
int row_tile_of_skip(const Problem& problem, int fewest) {
  const std::int64_t rows = std::min(problem.block_q, problem.seqlen_q);
  return rows <= fewest ? fewest : rows <= 64 ? 64 : 128;
}

}  // namespace

void choose_list_tiles(FwdConfig& config, const Problem& problem, std::int64_t packed_heads, int most_keys) {
  const bool wgmma = config.products == Products::wgmma;
  const int widest = std::max(config.d, config.dv);
  config.tiles = Tiles::list;
  const int smallest_granule = depth_of_product(config.type);  // keys: what one mma of P and V takes
  // A warp has 16 rows if registers do not suffice for 32.
  if (!wgmma && (config.tile_kv < 64 || widest > 64)) config.tile_q = std::min(config.tile_q, 64);
  // A query block's rows must be whole tiles. If one block has all queries, any tile will do.
  const std::int64_t rows = problem.block_q >= problem.seqlen_q ? config.tile_q : problem.block_q * packed_heads;
  const int fewest = !wgmma ? 32 : widest <= 128 ? 64 : 128;
  while (config.tile_q > fewest && rows % config.tile_q != 0) config.tile_q /= 2;
  if (rows % config.tile_q != 0) config.tile_q = std::max(64, fewest);
  if (config.skip != Skip::none) config.tile_q = row_tile_of_skip(problem, fewest);
  config.warps = wgmma ? config.tile_q / 16 : config.tile_q == 32 ? 2 : 4;
  const bool whole_rows = problem.block_q >= problem.seqlen_q || rows % config.tile_q == 0;
  config.list_elements = !whole_rows || problem.block_kv % smallest_granule != 0;
  const bool pairs = widest <= 64 && config.tile_q <= 64 && problem.block_kv % 64 == 0;
  if (!wgmma) config.tile_kv = pairs ? 128 : 64;
  if (wgmma && (config.list_elements || (config.tile_q == 64 && widest > 64))) {
    config.tile_kv = std::min(config.tile_kv, 64);
  }
  config.tile_kv = std::min(config.tile_kv, most_keys);
  const std::int64_t granule = std::min<std::int64_t>(largest_power_of_two_in(problem.block_kv), config.tile_kv);
  config.granule = config.list_elements ? config.tile_kv : static_cast<int>(granule);
  if (config.skip != Skip::none) {  // a warp has 16 rows, and a tile of keys lies in one key block
    config.warps = config.tile_q / 16;
    if (!config.list_elements) config.tile_kv = config.granule;
  }
  config.list_waives = config.has_mask() && problem.list.full && !config.list_elements;
}

ListParams list_params(const Problem& problem, const TileList& list, const detail::ListSlots& slots,
                       const Bindings& bindings) {
  ListParams p{};
  p.form = list.form == TileList::Form::indices   ? ListForm::indices
           : list.form == TileList::Form::bitmask ? ListForm::bitmask
                                                  : ListForm::transposed;
  p.heads = list.heads == TileList::Heads::q ? ListHeads::q : ListHeads::kv;
  p.has_full = list.full;
  p.partial = table_of(list, bindings[slots.counts], bindings[slots.indices], bindings[slots.bits]);
  if (list.full) {
    p.full = table_of(list, bindings[slots.full_counts], bindings[slots.full_indices], bindings[slots.full_bits]);
  }
  p.block_q = block_size(problem.block_q);
  p.block_kv = block_size(problem.block_kv);
  p.key_blocks = static_cast<int>(problem.key_blocks());
  p.second_block = static_cast<int>(problem.key_blocks_first());
  p.second_blocks = p.key_blocks - p.second_block;
  p.words = divide_up(p.key_blocks, 32);
  return p;
}

ListParams list_params(const Problem& problem, const Bindings& bindings) {
  return list_params(problem, problem.list, detail::list_slots(false), bindings);
}

}  // namespace tessera::cuda
