// SPDX-License-Identifier: Apache-2.0
// Scores blocks and keeps the best of them for each tile of queries, in one pass over the compressed keys (two with
// probabilities) and in memory that does not depend on their number. A scoring row has one vector, the sum over the
// heads that share a list; with probabilities it has one for each head. Vectors are multiplied by 64 keys at a time.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/block_list.cuh"
#include "cuda/sparse/select_mma.cuh"
#include "cuda/sparse/select_products.cuh"

namespace tessera::cuda {

template <SelectConfig C>
struct NsaSelect {
  static constexpr bool kDot = C.score == BlockScore::dot;
  static constexpr bool kAllRows = C.scoring == ScoringRows::all;
  static constexpr int kKeys = SelectConfig::kKeys;
  static constexpr int kPitch = SelectConfig::kPitch;
  static constexpr int kWarps = SelectConfig::kWarps;

  const SelectParams& p;
  const SelectWork& work;
  SelectProducts<C>& products;
  SelectTile* tiles;
  SelectKeyTile* key_tiles;
  int* row_visible;    // (rows): compressed keys that each row sees; with probabilities, or if all rows score
  float* sums;         // (rows of a panel, kPitch): scores of blocks, with probabilities
  float* maxima;       // (vectors): the largest product, with probabilities
  float* totals;       // (vectors): sums of exponentials, with probabilities
  float* tile_scores;  // (tiles, kPitch), if all rows score
  u64* lists;          // (tiles, top)
  u64* key_lists;      // (tiles, compressed top)

  static __device__ __forceinline__ void run(const SelectParams& p, char* memory) {
    ptx::griddepcontrol_wait_and_launch();
    const SelectWork work(p);
    SelectProducts<C> products(work, memory);
    const int vectors = p.tiles_together * tile_rows(p) * heads_apart(p);
    char* at = memory + C.query_bytes(p.d) + C.key_bytes() + C.score_bytes() + C.factor_bytes();
    const auto take = [&at](int bytes) {
      char* const from = at;
      at += bytes;
      return from;
    };
    auto* tiles = reinterpret_cast<SelectTile*>(take(p.tiles_together * SelectConfig::kStateBytes));
    auto* key_tiles = reinterpret_cast<SelectKeyTile*>(take(C.key_state_bytes(p.tiles_together)));
    auto* row_visible = reinterpret_cast<int*>(take(C.row_bytes(p.tiles_together * tile_rows(p))));
    auto* sums = reinterpret_cast<float*>(take(C.sum_bytes()));
    auto* maxima = reinterpret_cast<float*>(take(C.stat_bytes(vectors)));
    auto* tile_scores = reinterpret_cast<float*>(take(C.tile_bytes(p.tiles_together)));
    auto* lists = reinterpret_cast<u64*>(take(p.tiles_together * p.selected.top * 8));
    auto* key_lists = reinterpret_cast<u64*>(at);
    const NsaSelect select{p,    work,   products,         tiles,       key_tiles, row_visible,
                           sums, maxima, maxima + vectors, tile_scores, lists,     key_lists};
    select.select(vectors);
  }

  /// The number of vectors of a scoring row.
  static __device__ __forceinline__ int heads_apart(const SelectParams& p) {
    return kDot ? 1 : static_cast<int>(p.shared_heads.value);
  }
  static __device__ __forceinline__ int tile_rows(const SelectParams& p) { return static_cast<int>(p.tile_rows.value); }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int warp() { return thread() / 32; }
  static __device__ __forceinline__ int lane() { return thread() % 32; }

  __device__ __forceinline__ int rows() const { return p.tiles_together * tile_rows(p); }
  /// A tile can have more scoring rows than a panel only if all rows score.
  __device__ __forceinline__ int panels() const { return kAllRows ? p.panels : 1; }
  __device__ __forceinline__ int row_of(int vector) const { return ptx::divide(vector, p.shared_heads); }
  /// The number of rows of a panel; the last panel may have fewer.
  __device__ __forceinline__ int rows_of(int panel) const { return min(p.panel_rows, rows() - panel * p.panel_rows); }
  __device__ __forceinline__ int first_vector(int panel) const { return panel * p.panel_rows * heads_apart(p); }
  __device__ __forceinline__ int vectors_of(int panel) const { return rows_of(panel) * heads_apart(p); }
  __device__ __forceinline__ void load_panel(int panel) const {
    products.load_queries(first_vector(panel), vectors_of(panel));
  }

  __device__ __forceinline__ void select(int vectors) const {
    for (int i = thread(); i < p.tiles_together * p.selected.top; i += C.threads()) lists[i] = 0;
    if constexpr (C.has_compressed()) {
      for (int i = thread(); i < p.tiles_together * p.compressed.top; i += C.threads()) key_lists[i] = 0;
      for (int i = thread(); i < p.tiles_together; i += C.threads()) describe_keys(i);
    }
    for (int i = thread(); C.has_stats() && i < vectors; i += C.threads()) {
      maxima[i] = -kInfinity;
      totals[i] = 0.0F;
    }
    for (int i = thread(); i < p.tiles_together; i += C.threads()) describe_tile(i);
    for (int i = thread(); (C.has_stats() || kAllRows) && i < rows(); i += C.threads()) {
      row_visible[i] = work.visible_to(i, C.scoring);
    }
    int last = p.tiles_together - 1;
    while (last > 0 && !work.has_rows(last)) --last;
    const int visible = work.most_visible(last, C.scoring);
    products.end = visible;
    if (panels() == 1) load_panel(0);
    if constexpr (!kDot) {
      for (int panel = 0; panel < panels(); ++panel) add_exponentials(panel, visible);
    }
    const int candidates = work.candidates(visible);
    for (int first = 0; first < candidates; first += p.blocks_together) score_blocks(first, visible);
    __syncthreads();
    for (int tile = warp(); tile < p.tiles_together; tile += kWarps) {
      write_list<C.slots>(p.selected, tile, lists, tiles[tile].forced);
      if constexpr (C.has_compressed()) {
        write_list<C.compressed_slots>(p.compressed, tile, key_lists, key_tiles[tile].forced);
      }
    }
  }

  __device__ __forceinline__ void describe_tile(int index) const {
    SelectTile tile{};
    if (work.has_rows(index)) {
      tile.bar = __int_as_float(0x7fffffff);
      tile.forced = ForcedBlocks(work, index);
      const int end = min(tile.forced.begun, work.candidates(work.most_visible(index, C.scoring)));
      tile.end = tile.forced.places > 0 ? end : 0;
    }
    tiles[index] = tile;
  }

  __device__ __forceinline__ void describe_keys(int index) const {
    SelectKeyTile tile{};
    if (work.has_rows(index)) {
      tile.bar = __int_as_float(0x7fffffff);
      tile.best = -kInfinity;
      tile.forced = ForcedBlocks::of_keys(work, index);
      tile.end = tile.forced.places > 0 ? work.most_visible(index, C.scoring) : 0;
    }
    key_tiles[index] = tile;
  }

  /// The first pass, with probabilities: adds up the denominators of a panel's vectors.
  __device__ __forceinline__ void add_exponentials(int panel, int visible) const {
    if (panels() > 1) load_panel(panel);
    for (int first = 0; first < visible; first += kKeys) {
      products.multiply(first, first + kKeys < visible ? first + kKeys : -1);
      for (int i = warp(); i < vectors_of(panel); i += kWarps) {
        const int vector = first_vector(panel) + i;
        const int keys = min(kKeys, row_visible[row_of(vector)] - first);
        if (keys > 0) add_exponentials_of(vector, products.scores + i * kPitch, keys);
      }
    }
  }

  __device__ __forceinline__ void add_exponentials_of(int vector, const float* a, int keys) const {
    const float low = lane() < keys ? a[lane()] : -kInfinity;
    const float high = lane() + 32 < keys ? a[lane() + 32] : -kInfinity;
    const float before = maxima[vector];
    float largest = fmaxf(before, fmaxf(low, high));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, step));
    }
    // A product of −∞ adds 0, even if the maximum is −∞ too.
    float sum = (low == -kInfinity ? 0.0F : expf(low - largest)) + (high == -kInfinity ? 0.0F : expf(high - largest));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
    __syncwarp();  // all lanes have read the maximum before
    if (lane() == 0) {
      totals[vector] = (before == largest ? totals[vector] : totals[vector] * expf(before - largest)) + sum;
      maxima[vector] = largest;
    }
    __syncwarp();
  }

  /// Computes the scores of blocks [first, first + blocks_together) for all tiles, and offers them to the tiles' lists.
  __device__ __forceinline__ void score_blocks(int first, int visible) const {
    for (int panel = 0; panel < panels(); ++panel) {
      if (panels() > 1) load_panel(panel);
      if constexpr (kDot) {
        products.multiply(first, next_key(first, visible));  // a block is a key
      } else {
        add_probabilities(panel, first, visible, next_key(first, visible));
      }
      if constexpr (kAllRows) take_largest(panel, first);
    }
    offer_to_all(first, kAllRows ? tile_scores : kDot ? products.scores : sums);
  }

  /// The first key of the blocks after these, if the next product is with them; else −1.
  __device__ __forceinline__ int next_key(int first, int visible) const {
    const int next = first + p.blocks_together;
    return panels() == 1 && next < work.candidates(visible) ? work.first_key(next) : -1;
  }

  /// Adds the probabilities of the blocks' keys to `sums`, 64 keys at a time. `next`: the key to multiply next, or −1.
  __device__ __forceinline__ void add_probabilities(int panel, int first, int visible, int next) const {
    const int begin = work.first_key(first);
    const int end = min(visible, work.end_key(first, p.blocks_together));
    for (int key = begin; key < end; key += kKeys) {
      products.multiply(key, key + kKeys < end ? key + kKeys : next);
      for (int i = thread(); i < vectors_of(panel) * kKeys; i += C.threads()) {
        const int vector = first_vector(panel) + i / kKeys;
        float& a = products.scores[i / kKeys * kPitch + i % kKeys];
        const bool sees = key + i % kKeys < row_visible[row_of(vector)];
        a = sees ? expf(a - maxima[vector]) / totals[vector] : 0.0F;
      }
      __syncthreads();
      if constexpr (C.has_compressed()) {  // a tile has one row
        for (int tile = warp(); tile < p.tiles_together; tile += kWarps) {
          offer_keys(tile, key, products.scores + tile * heads_apart(p) * kPitch, heads_apart(p));
        }
      }
      for (int i = thread(); i < rows_of(panel) * p.blocks_together; i += C.threads()) {
        const int row = i / p.blocks_together;
        const int block = i - row * p.blocks_together;
        float& sum = sums[row * kPitch + block];
        sum = (key == begin ? 0.0F : sum) + add_keys(row, first + block, key, min(end, key + kKeys));
      }
    }
    __syncthreads();
  }

  /// What keys [begin, end) add to the score of a block for a row of the panel.
  __device__ __forceinline__ float add_keys(int row, int block, int begin, int end) const {
    const int stride = static_cast<int>(p.compression.stride.value);
    const int last = min(end, work.end_key(block, 1));
    const int first_token = block * static_cast<int>(p.block.value);
    const int end_token = first_token + static_cast<int>(p.block.value);
    float sum = 0.0F;
    for (int key = max(begin, work.first_key(block)); key < last; ++key) {
      const int token = key * stride;
      const int shared = min(token + p.compression.length, end_token) - max(token, first_token);
      const auto weight = static_cast<float>(ptx::divide(shared, p.compression.stride));
      const float* probability = products.scores + row * heads_apart(p) * kPitch + key - begin;
      for (int head = 0; head < heads_apart(p); ++head) sum += weight * probability[head * kPitch];
    }
    return sum;
  }

  /// Updates the scores of tiles by the largest scores of a panel's rows.
  __device__ __forceinline__ void take_largest(int panel, int first) const {
    const float* scores = kDot ? products.scores : sums;
    const int begin = panel * p.panel_rows;  // counted over the rows of all tiles
    const int end = begin + rows_of(panel);
    for (int i = thread(); i < p.tiles_together * p.blocks_together; i += C.threads()) {
      const int tile = i / p.blocks_together;
      const int block = i - tile * p.blocks_together;
      float largest = panel == 0 ? -kInfinity : tile_scores[tile * kPitch + block];
      const int last = min(end, (tile + 1) * tile_rows(p));
      for (int row = max(begin, tile * tile_rows(p)); row < last; ++row) {
        if (first + block >= work.candidates(row_visible[row])) continue;
        largest = fmaxf(largest, scores[(row - begin) * kPitch + block]);  // ignores NaN
      }
      tile_scores[tile * kPitch + block] = largest;
    }
    __syncthreads();
  }

  /// Offers scores of blocks [first, first + blocks_together), a row for each tile, to the lists. Most scores change no
  /// list, so a warp first tests which of eight tiles have scores that may; four lanes test a tile.
  __device__ __forceinline__ void offer_to_all(int first, const float* scores) const {
    static_assert(kWarps * 8 >= C.rows, "a warp has at most eight tiles");
    constexpr bool offers_keys = C.has_compressed() && kDot;
    const int tile = warp() + kWarps * (lane() / 4);
    bool changes = false, changes_keys = false;
    if (tile < p.tiles_together) {
      int end = tiles[tile].end;
      if constexpr (offers_keys) end = max(end, key_tiles[tile].end);
      const float largest = largest_of(scores + tile * kPitch, min(p.blocks_together, end - first));
      changes = first < tiles[tile].end && !(largest <= tiles[tile].bar);
      if constexpr (offers_keys) {
        const SelectKeyTile& of_keys = key_tiles[tile];
        changes_keys = first < of_keys.end && !(fmaxf(largest, of_keys.best) <= of_keys.bar);
      }
    }
    const auto for_each_tile = [&](bool is_one, auto&& visit) {
      for (u32 lanes = __ballot_sync(0xffffffffU, is_one); lanes != 0;) {
        const int group = (__ffs(static_cast<int>(lanes)) - 1) / 4;
        lanes &= ~(0xfU << group * 4);
        visit(warp() + kWarps * group);
      }
    };
    for_each_tile(changes, [&](int index) { offer(index, first, scores + index * kPitch); });
    if constexpr (offers_keys) {
      for_each_tile(changes_keys, [&](int index) { offer_keys(index, first, scores + index * kPitch, 1); });
    }
  }

  /// The largest of this lane's quarter of 64 scores, of which only the first `count` count; NaN is ignored.
  __device__ __forceinline__ float largest_of(const float* scores, int count) const {
    float largest = -kInfinity;
#pragma unroll
    for (int begin = 0; begin < kKeys; begin += 16) {
      const int first = begin + lane() % 4 * 4;
      const float4 four = *reinterpret_cast<const float4*>(scores + first);
      const float score[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, first + i < count ? score[i] : -kInfinity);
    }
    return largest;
  }

  /// Blocks come in ascending order. So one whose score equals the lowest of a full list is not taken.
  __device__ __forceinline__ void offer(int index, int first, const float* scores) const {
    SelectTile& tile = tiles[index];
    const int count = min(p.blocks_together, tile.end - first);
    if (count <= 0) return;
    const float bar = tile.bar;
    const ForcedBlocks forced = tile.forced;
    bool counts[2];
    float score[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half * 32 + lane();
      counts[half] = at < count && !forced.has(first + at);
      score[half] = counts[half] ? scores[at] : 0.0F;
      counts[half] = counts[half] && !(score[half] <= bar);
    }
    if (__ballot_sync(0xffffffffU, counts[0] || counts[1]) == 0) return;
    BlockList<C.slots> list;
    list.load(lists + index * p.selected.top, p.selected.top);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      list.offer(counts[half] ? entry_of(score[half], first + half * 32 + lane()) : 0, forced.places);
    }
    list.store(lists + index * p.selected.top, p.selected.top);
    const u64 least = list.at(forced.places - 1);
    if (lane() == 0 && least != 0) tile.bar = score_of(least);
  }

  /// Takes the 64 compressed keys from `first` on, except those that an earlier call took, and offers their blocks. A
  /// block's score is that of its best key, a key's score the sum of its scores in `heads` rows.
  __device__ __forceinline__ void offer_keys(int index, int first, const float* scores, int heads) const {
    SelectKeyTile& tile = key_tiles[index];
    const int end = tile.end;
    const int last = min(first + kKeys, end);
    float best = tile.best;
    int key = max(first, tile.next);
    if (key >= last) return;
    while (key < last) {
      const int block = ptx::divide(key, p.compressed_block);
      const int block_end = min((block + 1) * static_cast<int>(p.compressed_block.value), end);
      const int stop = min(block_end, last);
      float largest = -kInfinity;
      for (int at = key - first + lane(); at < stop - first; at += 32) {
        float score = scores[at];
        for (int head = 1; head < heads; ++head) score += scores[head * kPitch + at];
        largest = fmaxf(largest, score);  // ignores NaN
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, step));
      }
      best = fmaxf(best, largest);
      if (stop == block_end) {
        offer_key_block(tile, index, block, best);
        best = -kInfinity;
      }
      key = stop;
    }
    __syncwarp();
    if (lane() == 0) {
      tile.best = best;
      tile.next = key;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void offer_key_block(SelectKeyTile& tile, int index, int block, float score) const {
    const int places = tile.forced.places;
    if (tile.forced.has(block) || score <= tile.bar) return;
    BlockList<C.compressed_slots> list;
    u64* const entries = key_lists + index * p.compressed.top;
    list.load(entries, p.compressed.top);
    list.offer(lane() == 0 ? entry_of(score, block) : 0, places);
    list.store(entries, p.compressed.top);
    const u64 least = list.at(places - 1);
    __syncwarp();  // all lanes have read the bar before
    if (lane() == 0 && least != 0) tile.bar = score_of(least);
    __syncwarp();
  }

  template <int slots>
  __device__ __forceinline__ void write_list(const SelectedLists& to, int tile, const u64* entries,
                                             const ForcedBlocks& forced) const {
    if (work.first_tile + tile >= p.tiles) return;
    const i64 at_tile = work.first_tile + tile;
    const auto place = [&](const i64* strides) {
      return work.batch * strides[0] + work.list * strides[1] + at_tile * strides[2];
    };
    int* const indices = to.indices + place(to.index_strides);
    int taken = 0;
    if (work.has_rows(tile)) {
      BlockList<slots> list;
      list.load(entries + tile * to.top, to.top);
      taken = list.write(indices, forced, to.top);
    } else {
      for (int i = lane(); i < to.top; i += 32) indices[i] = -1;
    }
    if (lane() == 0) to.counts[place(to.count_strides)] = taken;
  }
};

}  // namespace tessera::cuda
