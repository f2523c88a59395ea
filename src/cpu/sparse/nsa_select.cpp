// SPDX-License-Identifier: Apache-2.0
// The operation `nsa_select`: scores blocks by their compressed keys and selects the best ones for each tile of
// queries, in one pass over the keys for several rows at a time (docs/nsa.md; Yuan et al. 2025, equations 8 to 12).
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/parallel.h"
#include "cpu/implementations.h"
#include "cpu/sparse/block_scores.h"
#include "cpu/sparse/compressed.h"
#include "cpu/tiles/arena.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kPanelRows = 24;  // scoring rows times heads of one product with keys: a multiple of 6 and 12
constexpr std::int64_t kKeys = 64;       // compressed keys of a product
constexpr std::int64_t kUnitRows = 96;   // scoring rows times heads of a unit of work, or one tile
constexpr float kNothing = -std::numeric_limits<float>::infinity();

std::int64_t most_blocks(const Problem& p) { return detail::compressed_blocks(p.nsa, p.kv.seqlen); }
std::int64_t padded_blocks(const Problem& p) { return detail::ceil_div(most_blocks(p), kKeys) * kKeys; }
/// Heads that share a list.
std::int64_t shared_heads(const Problem& p) { return p.nsa.query_heads ? 1 : p.group(); }
std::int64_t scoring_rows(const Nsa& nsa) { return nsa.reduce == TileReduce::max ? nsa.tile : 1; }
std::int64_t tiles_of_unit(const Problem& p) {
  return std::max<std::int64_t>(1, kUnitRows / std::min(kUnitRows, scoring_rows(p.nsa)) / shared_heads(p));
}

/// A thread's memory.
struct Buffers {
  Buffers(Arena& arena, const Problem& problem) {
    const std::int64_t width = padded(problem.head_dim_qk);
    const std::int64_t blocks = detail::ceil_div(problem.kv.seqlen, problem.nsa.block);
    q = arena.take<float>(kPanelRows, width);
    row = arena.take<float>(width);
    keys = arena.take<float>(kKeys, width);
    transposed = arena.take<float>(width, kKeys);
    products = arena.take<float>(kPanelRows, padded_blocks(problem));
    row_scores = arena.take<float>(blocks);
    tile_scores = arena.take<float>(blocks);
    order = arena.take<std::int32_t>(blocks);
    indices = arena.take<std::int32_t>(problem.nsa.top);
    if (problem.nsa.compressed_top == 0) return;
    const std::int64_t key_blocks = detail::ceil_div(most_blocks(problem), problem.nsa.compressed_block);
    key_scores = arena.take<float>(padded_blocks(problem));
    key_block_scores = arena.take<float>(key_blocks);
    key_block_order = arena.take<std::int32_t>(key_blocks);
    key_block_indices = arena.take<std::int32_t>(problem.nsa.compressed_top);
  }
  float *q, *row, *keys, *transposed, *products, *row_scores, *tile_scores;
  std::int32_t *order, *indices;
  float *key_scores = nullptr, *key_block_scores = nullptr;  // of the second list, if there is one
  std::int32_t *key_block_order = nullptr, *key_block_indices = nullptr;
};

std::size_t thread_bytes(const Problem& problem) {
  Arena counter;
  const Buffers buffers(counter, problem);
  return counter.used();
}

Support supports(const Problem& problem, const Target& /*target*/, const Wishes& /*wishes*/) {
  return has_kernels_of({problem.q_type, problem.k_type});
}

void plan(detail::PlanState& state) {
  Arena arena;
  arena.take<std::int64_t>(state.problem.batch);
  arena.take<std::byte>(state.target.threads, thread_bytes(state.problem));
  state.workspace_bytes = arena.used();
  state.choice = "scores of " + std::to_string(kPanelRows) + " rows at a time\n";
}

/// A row of a panel: one head of a scoring row.
struct ScoringRow {
  std::int64_t tile, row, head;  // row: of the tile
  std::int64_t visible;          // compressed keys
};

/// Consecutive tiles of queries in one sequence, for the heads that share a list.
class Tiles {
 public:
  Tiles(const Problem& problem, const Bindings& bindings, const Kernels& kernels, const Sequence& queries,
        const CompressedSequence& keys, std::int64_t list_head, const Buffers& buffers)
      : p_(problem),
        nsa_(problem.nsa),
        bindings_(bindings),
        kernels_(kernels),
        queries_(queries),
        keys_(keys),
        list_head_(list_head),
        first_head_(list_head * shared_heads(problem)),
        b_(buffers),
        width_(padded(problem.head_dim_qk)) {
    if (const Tensor& offsets = bindings[Slot::q_offset]) offset_ = offsets.as<const std::int64_t>()[queries.batch];
  }

  /// Writes the lists of tiles [begin, end), each of which has rows.
  void run(std::int64_t begin, std::int64_t end, detail::Workers& workers) const {
    ScoringRow panel[kPanelRows];
    std::int64_t count = 0;
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const std::int64_t rows = std::min(scoring_rows(nsa_), queries_.q_length - tile * nsa_.tile);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t head = 0; head < shared_heads(p_); ++head) {
          panel[count++] = {tile, row, head, visible_blocks(nsa_, position(tile, row), keys_.blocks)};
          if (count < kPanelRows) continue;
          finish_panel(panel, count);
          count = 0;
          if (workers.stopped()) return;
        }
      }
    }
    finish_panel(panel, count);
  }

  /// Writes the empty lists of a tile behind the end of the sequence.
  void write_empty(std::int64_t tile) const {
    std::fill_n(b_.indices, nsa_.top, -1);
    write_list(tile, 0, Slot::selected_counts, Slot::selected_indices, b_.indices, nsa_.top);
    if (nsa_.compressed_top == 0) return;
    std::fill_n(b_.key_block_indices, nsa_.compressed_top, -1);
    write_compressed_list(tile, 0);
  }

 private:
  /// The position of a scoring row.
  [[nodiscard]] std::int64_t position(std::int64_t tile, std::int64_t row) const {
    const std::int64_t first = offset_ + tile * nsa_.tile;
    return nsa_.reduce == TileReduce::mean ? first + nsa_.tile - 1 : first + row;
  }

  void finish_panel(const ScoringRow* panel, std::int64_t count) const {
    if (count == 0) return;
    std::int64_t most = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      load_query(panel[i], b_.q + i * width_);
      most = std::max(most, panel[i].visible);
    }
    multiply(count, most);
    for (std::int64_t i = 0; i < count; ++i) finish_row(panel[i], b_.products + i * padded_blocks(p_));
  }

  /// Loads a scoring row, times the scale.
  void load_query(const ScoringRow& of, float* to) const {
    const Tensor& q = bindings_[Slot::q];
    const RowView from = rows_of(p_, q, queries_);
    const std::int64_t first = of.tile * nsa_.tile, head = first_head_ + of.head;
    if (nsa_.reduce != TileReduce::mean) {
      kernels_.load_row(q.dtype, from.at(first + of.row, head), p_.head_dim_qk, p_.softmax_scale(), to, width_);
      return;
    }
    const std::int64_t rows = std::min(nsa_.tile, queries_.q_length - first);
    std::fill_n(to, width_, 0.0F);
    for (std::int64_t row = 0; row < rows; ++row) {
      kernels_.load_row(q.dtype, from.at(first + row, head), p_.head_dim_qk, 1.0F, b_.row, width_);
      for (std::int64_t c = 0; c < width_; ++c) to[c] += b_.row[c];
    }
    for (std::int64_t c = 0; c < width_; ++c) to[c] = to[c] / static_cast<float>(rows) * p_.softmax_scale();
  }

  void multiply(std::int64_t rows, std::int64_t blocks) const {
    const Tensor& k = bindings_[Slot::k_pooled];
    const RowView from = pooled_rows_of(p_, k, keys_);
    const std::int64_t head = p_.nsa.query_heads ? list_head_ / p_.group() : list_head_;
    for (std::int64_t first = 0; first < blocks; first += kKeys) {
      const std::int64_t count = std::min(kKeys, blocks - first);
      kernels_.load_rows(k.dtype, from.at(first, head), from.row, count, p_.head_dim_qk, 1.0F, b_.keys, width_);
      std::fill(b_.keys + count * width_, b_.keys + kKeys * width_, 0.0F);
      kernels_.transpose(kKeys, width_, b_.keys, width_, b_.transposed, kKeys);
      kernels_.matmul(rows, kKeys, p_.head_dim_qk, {b_.q, width_, 1}, b_.transposed, kKeys, b_.products + first,
                      padded_blocks(p_), false, nullptr);
    }
  }

  void finish_row(const ScoringRow& of, float* products) const {
    const std::int64_t candidates = candidate_blocks(nsa_, of.visible);
    const std::int64_t tile_candidates = candidate_blocks(nsa_, visible_at_end(of.tile));
    if (of.row == 0 && of.head == 0) std::fill_n(b_.tile_scores, tile_candidates, kNothing);
    if (of.head == 0) std::fill_n(b_.row_scores, candidates, 0.0F);
    if (nsa_.score == SelectScore::softmax) normalise(products, of.visible);
    add_block_scores(nsa_, products, of.visible, b_.row_scores);
    if (nsa_.compressed_top > 0) score_key_blocks(of, products);
    if (of.head + 1 < shared_heads(p_)) return;
    for (std::int64_t block = 0; block < candidates; ++block) {
      if (b_.row_scores[block] > b_.tile_scores[block]) b_.tile_scores[block] = b_.row_scores[block];  // NaN never is
    }
    const std::int64_t first = of.tile * nsa_.tile;
    if (of.row + 1 < std::min(scoring_rows(nsa_), queries_.q_length - first)) return;
    const std::int32_t count = choose_blocks(blocks_of_tokens(nsa_, offset_ + first, keys_.tokens, tile_candidates),
                                             b_.tile_scores, b_.order, b_.indices);
    write_list(of.tile, count, Slot::selected_counts, Slot::selected_indices, b_.indices, nsa_.top);
    if (nsa_.compressed_top == 0) return;
    const BlockChoice choice = blocks_of_keys(nsa_, offset_ + first, keys_.blocks, visible_at_end(of.tile));
    write_compressed_list(of.tile,
                          choose_blocks(choice, b_.key_block_scores, b_.key_block_order, b_.key_block_indices));
  }

  /// Adds a head's products, or probabilities, to the scores of compressed keys. With the last head it also raises the
  /// scores of their blocks.
  void score_key_blocks(const ScoringRow& of, const float* a) const {
    if (of.row == 0 && of.head == 0) {
      std::fill_n(b_.key_block_scores, detail::ceil_div(visible_at_end(of.tile), nsa_.compressed_block), kNothing);
    }
    if (of.head == 0) std::fill_n(b_.key_scores, of.visible, 0.0F);
    for (std::int64_t j = 0; j < of.visible; ++j) b_.key_scores[j] += a[j];
    if (of.head + 1 == shared_heads(p_)) raise_key_blocks(nsa_, b_.key_scores, of.visible, b_.key_block_scores);
  }

  /// How many compressed keys the last scoring row of a tile sees.
  [[nodiscard]] std::int64_t visible_at_end(std::int64_t tile) const {
    const std::int64_t rows = std::min(scoring_rows(nsa_), queries_.q_length - tile * nsa_.tile);
    return visible_blocks(nsa_, position(tile, rows - 1), keys_.blocks);
  }

  /// Replaces the products with visible keys by their softmax.
  void normalise(float* a, std::int64_t visible) const {
    float maximum = kNothing;
    for (std::int64_t j = 0; j < visible; ++j) maximum = std::max(maximum, a[j]);
    std::fill(a + visible, a + padded(visible), kNothing);
    kernels_.exp_rows(1, padded(visible), a, padded_blocks(p_), &maximum);
    float sum = 0.0F;
    for (std::int64_t j = 0; j < visible; ++j) sum += a[j];
    for (std::int64_t j = 0; j < visible; ++j) a[j] /= sum;
  }

  void write_compressed_list(std::int64_t tile, std::int32_t count) const {
    write_list(tile, count, Slot::compressed_counts, Slot::compressed_indices, b_.key_block_indices,
               nsa_.compressed_top);
  }

  void write_list(std::int64_t tile, std::int32_t count, Slot count_slot, Slot index_slot, const std::int32_t* entries,
                  std::int64_t top) const {
    const Tensor& counts = bindings_[count_slot];
    const Tensor& indices = bindings_[index_slot];
    const auto at = [&](const Tensor& tensor) {
      return tensor.as<std::int32_t>() + queries_.batch * tensor.strides[0] + list_head_ * tensor.strides[1] +
             tile * tensor.strides[2];
    };
    *at(counts) = count;
    std::copy_n(entries, top, at(indices));
  }

  const Problem& p_;
  const Nsa& nsa_;
  const Bindings& bindings_;
  const Kernels& kernels_;
  const Sequence& queries_;
  const CompressedSequence& keys_;
  std::int64_t list_head_, first_head_;
  const Buffers& b_;
  std::int64_t width_;
  std::int64_t offset_ = 0;  // position of row 0
};

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& p = state.problem;
  const Kernels& kernels = kernels_for(state.target.isa);
  Arena arena(resources.workspace);
  auto* first_blocks = arena.take<std::int64_t>(p.batch);
  const std::size_t bytes = thread_bytes(p);
  std::byte* memory = arena.take<std::byte>(state.target.threads, bytes);
  find_first_blocks(p, bindings, first_blocks);
  const std::int64_t tiles = detail::select_tiles(p), together = tiles_of_unit(p);
  const std::int64_t units = detail::ceil_div(tiles, together), heads = detail::select_heads(p);
  detail::WorkQueue queue(resources.workers, p.batch * heads * units);
  resources.workers.parallel([&](int thread) {
    Arena own(memory + static_cast<std::size_t>(thread) * bytes);
    const Buffers buffers(own, p);
    queue.drain([&](std::int64_t index) {
      // The last tiles see the most keys, so they go first.
      const std::int64_t unit = units - 1 - index / heads / p.batch;
      const Sequence queries = find_query_rows(p, bindings, index / heads % p.batch);
      const CompressedSequence keys = find_compressed(p, bindings, queries.batch, first_blocks);
      const Tiles work(p, bindings, kernels, queries, keys, index % heads, buffers);
      const std::int64_t begin = unit * together, end = std::min(tiles, begin + together);
      const std::int64_t used = std::clamp(detail::ceil_div(queries.q_length, p.nsa.tile), begin, end);
      work.run(begin, used, resources.workers);
      for (std::int64_t tile = used; tile < end; ++tile) work.write_empty(tile);
    });
  });
}

}  // namespace

const Implementation kNsaSelect = {{"cpu.nsa_select", DeviceType::cpu, Operation::nsa_select, supports, plan}, run};

}  // namespace tessera::cpu
