// SPDX-License-Identifier: Apache-2.0
// The oracle's nsa_select: computes one score after another, of every block for every tile, as in docs/nsa.md.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Real>
class Selection {
 public:
  Selection(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order)
      : p_(problem), nsa_(problem.nsa), bindings_(bindings), result_(result), scales_q_(order % 2 == 1) {
    columns_.resize(static_cast<std::size_t>(p_.head_dim_qk));
    std::iota(columns_.begin(), columns_.end(), 0);
    if (order != 0) std::shuffle(columns_.begin(), columns_.end(), std::mt19937(order));
  }

  void run() {
    const Sequences sequences = resolve_sequences(p_, bindings_);
    const std::int64_t list_heads = nsa_.query_heads ? p_.heads_q : p_.heads_kv;
    const std::int64_t tiles = (p_.seqlen_q + nsa_.tile - 1) / nsa_.tile;
    const std::int64_t most = (p_.kv.seqlen + nsa_.block - 1) / nsa_.block;
    const std::int64_t most_keys = complete_blocks(p_.kv.seqlen);
    const std::int64_t most_compressed = (most_keys + nsa_.compressed_block - 1) / nsa_.compressed_block;
    const std::int64_t lists = p_.batch * list_heads * tiles;
    result_[Slot::selected_counts].resize(lists);
    result_[Slot::selected_indices].resize(lists * nsa_.top);
    result_.next_mass.assign(static_cast<std::size_t>(lists * most), kNotCandidate);
    if (nsa_.compressed_top > 0) {
      result_[Slot::compressed_counts].resize(lists);
      result_[Slot::compressed_indices].resize(lists * nsa_.compressed_top);
      result_.compressed_scores.assign(static_cast<std::size_t>(lists * most_compressed), kNotCandidate);
    }
    std::int64_t list = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      rows_ = sequences.query[static_cast<std::size_t>(b)];
      tokens_ = sequences.keys[0][static_cast<std::size_t>(b)].length;
      blocks_ = complete_blocks(tokens_);
      const Tensor& offsets = bindings_[Slot::q_offset];
      offset_ = offsets ? static_cast<std::int64_t>(read(offsets, b * offsets.strides[0])) : 0;
      for (std::int64_t h = 0; h < list_heads; ++h) {
        for (std::int64_t tile = 0; tile < tiles; ++tile, ++list) {
          Scores scores(most, most_compressed);
          if (tile * nsa_.tile < rows_.length) scores = tile_scores(h, tile, scores);
          std::copy(scores.of_blocks.begin(), scores.of_blocks.end(), result_.next_mass.begin() + list * most);
          write(list, Slot::selected_counts, Slot::selected_indices, nsa_.top, scores.of_blocks,
                [&](std::int64_t block) { return keeps_place(tile, block); });
          if (nsa_.compressed_top == 0) continue;
          std::copy(scores.of_keys.begin(), scores.of_keys.end(),
                    result_.compressed_scores.begin() + list * most_compressed);
          write(list, Slot::compressed_counts, Slot::compressed_indices, nsa_.compressed_top, scores.of_keys,
                [&](std::int64_t block) { return keeps_compressed_place(tile, block); });
        }
      }
      first_block_ += p_.kv.layout == KvLayout::varlen ? blocks_ : complete_blocks(p_.kv.seqlen);
    }
  }

  static constexpr double kNotCandidate = std::numeric_limits<double>::quiet_NaN();

 private:
  using Row = std::vector<Real>;
  /// For each block: infinity if it is forced, otherwise its score, or −infinity if that is NaN; NaN if it may not be
  /// taken.
  struct Scores {
    Scores(std::int64_t blocks, std::int64_t key_blocks)
        : of_blocks(static_cast<std::size_t>(blocks), kNotCandidate),
          of_keys(static_cast<std::size_t>(key_blocks), kNotCandidate) {}
    std::vector<double> of_blocks;  // of tokens
    std::vector<double> of_keys;    // blocks of compressed keys
  };

  [[nodiscard]] std::int64_t complete_blocks(std::int64_t tokens) const {
    std::int64_t blocks = 0;
    while (blocks * nsa_.stride + nsa_.length <= tokens) ++blocks;
    return blocks;
  }

  Scores tile_scores(std::int64_t h, std::int64_t tile, Scores scores) const {
    const std::int64_t begin = tile * nsa_.tile;
    const std::int64_t end = std::min(begin + nsa_.tile, rows_.length);
    if (nsa_.reduce == TileReduce::max) {
      for (std::int64_t row = begin; row < end; ++row) add_row(h, {row}, offset_ + row, scores);
    } else if (nsa_.reduce == TileReduce::first) {
      add_row(h, {begin}, offset_ + begin, scores);
    } else {
      std::vector<std::int64_t> all(static_cast<std::size_t>(end - begin));
      std::iota(all.begin(), all.end(), begin);
      add_row(h, all, offset_ + begin + nsa_.tile - 1, scores);
    }
    for (std::int64_t block = 0; block * nsa_.block < tokens_; ++block) {
      double& score = scores.of_blocks[static_cast<std::size_t>(block)];
      if (is_forced(tile, block)) score = kInfinity;
      if (nsa_.causal && block * nsa_.block > offset_ + begin + nsa_.tile - 1) score = kNotCandidate;
    }
    for (std::int64_t block = 0; block * nsa_.compressed_block < blocks_; ++block) {
      if (keeps_compressed_place(tile, block)) scores.of_keys[static_cast<std::size_t>(block)] = kInfinity;
    }
    return scores;
  }

  [[nodiscard]] bool is_forced(std::int64_t tile, std::int64_t block) const {
    const std::int64_t last = offset_ + (tile + 1) * nsa_.tile - 1;
    if (nsa_.causal && block * nsa_.block > last) return false;
    return keeps_place(tile, block);
  }
  [[nodiscard]] bool keeps_place(std::int64_t tile, std::int64_t block) const {
    const std::int64_t first = offset_ + tile * nsa_.tile, last = first + nsa_.tile - 1;
    if (block < nsa_.initial) return true;
    return nsa_.local > 0 && block > first / nsa_.block - nsa_.local && block <= last / nsa_.block;
  }

  /// Whether a list entry is reserved for a block of compressed keys: it has a key that the tile's last row sees but
  /// not its first row, or the newest key that the first row sees.
  [[nodiscard]] bool keeps_compressed_place(std::int64_t tile, std::int64_t block) const {
    const std::int64_t first = offset_ + tile * nsa_.tile, last = first + nsa_.tile - 1;
    if (!nsa_.causal || !sees(last, 0)) return false;
    for (std::int64_t j = block * nsa_.compressed_block; j < (block + 1) * nsa_.compressed_block; ++j) {
      const bool newest_of_first = j == 0 ? !sees(first, 1) : sees(first, j) && !sees(first, j + 1);
      if (newest_of_first || (sees(last, j) && !sees(first, j))) return true;
    }
    return false;
  }
  [[nodiscard]] bool sees(std::int64_t position, std::int64_t j) const {
    const std::int64_t needed = nsa_.visible == BlockVisible::complete ? nsa_.length - 1 : 0;
    return !nsa_.causal || j * nsa_.stride + needed <= position;
  }

  /// Raises scores to those of the mean of some queries, over the keys that a row at `position` sees.
  void add_row(std::int64_t h, const std::vector<std::int64_t>& queries, std::int64_t position, Scores& scores) const {
    std::vector<std::int64_t> visible;
    for (std::int64_t j = 0; j < blocks_; ++j) {
      if (sees(position, j)) visible.push_back(j);
    }
    Row sums(scores.of_blocks.size()), key_sums(visible.size());
    std::vector<bool> candidate(sums.size());
    const std::int64_t group = p_.heads_q / p_.heads_kv;
    const std::int64_t shared = nsa_.query_heads ? 1 : group;
    for (std::int64_t head = h * shared; head < (h + 1) * shared; ++head) {
      Row weights = products(queries, head, head / group, visible);
      if (nsa_.score == SelectScore::softmax) normalise(weights);
      for (std::size_t i = 0; i < visible.size(); ++i) {
        key_sums[i] += weights[i];
        for (std::int64_t t = 0; t < nsa_.length;
             t += nsa_.stride) {  // a token of each stride, one of each block for dot
          const std::size_t block = static_cast<std::size_t>((visible[i] * nsa_.stride + t) / nsa_.block);
          candidate[block] = true;
          sums[block] += weights[i];
        }
      }
    }
    for (std::size_t block = 0; block < sums.size(); ++block) {
      if (candidate[block]) raise(scores.of_blocks[block], sums[block]);
    }
    for (std::size_t i = 0; i < visible.size() && nsa_.compressed_top > 0; ++i) {
      raise(scores.of_keys[static_cast<std::size_t>(visible[i] / nsa_.compressed_block)], key_sums[i]);
    }
  }
  static void raise(double& score, Real by) {
    const double value = std::isnan(by) ? -kInfinity : static_cast<double>(by);
    score = std::isnan(score) ? value : std::max(score, value);
  }

  [[nodiscard]] Row products(const std::vector<std::int64_t>& queries, std::int64_t head, std::int64_t key_head,
                             const std::vector<std::int64_t>& visible) const {
    const Tensor& q = bindings_[Slot::q];
    const Tensor& k = bindings_[Slot::k_pooled];
    const Real scale = static_cast<Real>(p_.softmax_scale());
    Row row(static_cast<std::size_t>(p_.head_dim_qk));
    for (const std::int64_t i : queries) {
      const std::int64_t at = token_offset(q, rows_.first_token + i, head);
      for (std::size_t c = 0; c < row.size(); ++c)
        row[c] += static_cast<Real>(read(q, at + static_cast<std::int64_t>(c)));
    }
    for (Real& x : row) x /= static_cast<Real>(queries.size());
    if (scales_q_) {
      for (Real& x : row) x *= scale;
    }
    Row sums;
    for (const std::int64_t j : visible) {
      const std::int64_t at = token_offset(k, first_block_ + j, key_head);
      Real sum = 0;
      for (const std::int64_t c : columns_)
        sum += row[static_cast<std::size_t>(c)] * static_cast<Real>(read(k, at + c));
      sums.push_back(scales_q_ ? sum : sum * scale);
    }
    return sums;
  }

  static void normalise(Row& row) {
    Real largest = -std::numeric_limits<Real>::infinity();
    for (const Real x : row) largest = std::max(largest, x);
    Real sum = 0;
    for (Real& x : row) sum += x = std::exp(x - largest);
    for (Real& x : row) x /= sum;
  }

  template <class Keeps>
  void write(std::int64_t list, Slot counts, Slot indices, std::int64_t top, const std::vector<double>& scores,
             Keeps keeps) {
    const std::int64_t tile = list % ((p_.seqlen_q + nsa_.tile - 1) / nsa_.tile);
    std::int64_t places = top;
    for (std::int64_t block = 0; block <= offset_ + (tile + 1) * nsa_.tile + nsa_.initial; ++block) {
      if (keeps(block)) --places;
    }
    std::vector<std::int64_t> taken, others;
    for (std::size_t block = 0; block < scores.size(); ++block) {
      if (std::isnan(scores[block])) continue;
      (scores[block] == kInfinity && keeps(static_cast<std::int64_t>(block)) ? taken : others)
          .push_back(static_cast<std::int64_t>(block));
    }
    std::stable_sort(others.begin(), others.end(), [&](std::int64_t a, std::int64_t b) {
      return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
    });
    if (static_cast<std::int64_t>(others.size()) > places) others.resize(static_cast<std::size_t>(places));
    taken.insert(taken.end(), others.begin(), others.end());
    std::sort(taken.begin(), taken.end());
    result_[counts].set(list, static_cast<double>(taken.size()));
    taken.resize(static_cast<std::size_t>(top), -1);
    for (std::int64_t i = 0; i < top; ++i) {
      result_[indices].set(list * top + i, static_cast<double>(taken[static_cast<std::size_t>(i)]));
    }
  }

  const Problem& p_;
  const Nsa& nsa_;
  const Bindings& bindings_;
  Result& result_;
  bool scales_q_;
  std::vector<std::int64_t> columns_;  // in the order in which products are added
  Rows rows_;
  std::int64_t tokens_ = 0, blocks_ = 0, first_block_ = 0;  // of the sequence
  std::int64_t offset_ = 0;                                 // position of its row 0
};

}  // namespace

template <>
void compute_operation<Operation::nsa_select>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                              std::uint32_t order, Result& result) {
  if (arithmetic == Arithmetic::oracle) {
    Selection<double>(problem, bindings, result, order).run();
  } else {
    Selection<float>(problem, bindings, result, order).run();
  }
}

}  // namespace tessera::reference
