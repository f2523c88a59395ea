// SPDX-License-Identifier: Apache-2.0
// The oracle's nsa_select: every tile's score of every block by the formulas of docs/nsa.md, one after another.
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
    const std::int64_t lists = p_.batch * list_heads * tiles;
    result_[Slot::selected_counts].resize(lists);
    result_[Slot::selected_indices].resize(lists * nsa_.top);
    result_.next_mass.assign(static_cast<std::size_t>(lists * most), kNotCandidate);
    std::int64_t list = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      rows_ = sequences.query[static_cast<std::size_t>(b)];
      tokens_ = sequences.keys[0][static_cast<std::size_t>(b)].length;
      blocks_ = complete_blocks(tokens_);
      const Tensor& offsets = bindings_[Slot::q_offset];
      offset_ = offsets ? static_cast<std::int64_t>(read(offsets, b * offsets.strides[0])) : 0;
      for (std::int64_t h = 0; h < list_heads; ++h) {
        for (std::int64_t tile = 0; tile < tiles; ++tile, ++list) {
          std::vector<double> scores(static_cast<std::size_t>(most), kNotCandidate);
          if (tile * nsa_.tile < rows_.length) scores = tile_scores(h, tile, most);
          std::copy(scores.begin(), scores.end(), result_.next_mass.begin() + list * most);
          write(list, scores);
        }
      }
      first_block_ += p_.kv.layout == KvLayout::varlen ? blocks_ : complete_blocks(p_.kv.seqlen);
    }
  }

  static constexpr double kNotCandidate = std::numeric_limits<double>::quiet_NaN();

 private:
  using Row = std::vector<Real>;

  [[nodiscard]] std::int64_t complete_blocks(std::int64_t tokens) const {
    std::int64_t blocks = 0;
    while (blocks * nsa_.stride + nsa_.length <= tokens) ++blocks;
    return blocks;
  }

  /// Of each block: infinite if it is forced, its score, −infinite if that is NaN; NaN if it may not be taken.
  std::vector<double> tile_scores(std::int64_t h, std::int64_t tile, std::int64_t most) const {
    const std::int64_t begin = tile * nsa_.tile;
    const std::int64_t end = std::min(begin + nsa_.tile, rows_.length);
    std::vector<double> scores(static_cast<std::size_t>(most), kNotCandidate);
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
      double& score = scores[static_cast<std::size_t>(block)];
      if (is_forced(tile, block)) score = kInfinity;
      if (nsa_.causal && block * nsa_.block > offset_ + begin + nsa_.tile - 1) score = kNotCandidate;
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

  /// The scores of the mean of some queries, by what a row at `position` sees.
  void add_row(std::int64_t h, const std::vector<std::int64_t>& queries, std::int64_t position,
               std::vector<double>& scores) const {
    std::vector<std::int64_t> visible;
    for (std::int64_t j = 0; j < blocks_; ++j) {
      const std::int64_t needed = nsa_.visible == BlockVisible::complete ? nsa_.length - 1 : 0;
      if (!nsa_.causal || j * nsa_.stride + needed <= position) visible.push_back(j);
    }
    Row sums(scores.size());
    std::vector<bool> candidate(scores.size());
    const std::int64_t group = p_.heads_q / p_.heads_kv;
    const std::int64_t shared = nsa_.query_heads ? 1 : group;
    for (std::int64_t head = h * shared; head < (h + 1) * shared; ++head) {
      Row weights = products(queries, head, head / group, visible);
      if (nsa_.score == SelectScore::softmax) normalise(weights);
      for (std::size_t i = 0; i < visible.size(); ++i) {
        for (std::int64_t t = 0; t < nsa_.length;
             t += nsa_.stride) {  // a token of each stride, one of each block for dot
          const std::size_t block = static_cast<std::size_t>((visible[i] * nsa_.stride + t) / nsa_.block);
          candidate[block] = true;
          sums[block] += weights[i];
        }
      }
    }
    for (std::size_t block = 0; block < scores.size(); ++block) {
      if (!candidate[block]) continue;
      const double score = std::isnan(sums[block]) ? -kInfinity : static_cast<double>(sums[block]);
      scores[block] = std::isnan(scores[block]) ? score : std::max(scores[block], score);
    }
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

  void write(std::int64_t list, const std::vector<double>& scores) {
    const std::int64_t tile = list % ((p_.seqlen_q + nsa_.tile - 1) / nsa_.tile);
    std::int64_t places = nsa_.top;
    for (std::int64_t block = 0; block <= (offset_ + (tile + 1) * nsa_.tile) / nsa_.block + nsa_.initial; ++block) {
      if (keeps_place(tile, block)) --places;
    }
    std::vector<std::int64_t> taken, others;
    for (std::size_t block = 0; block < scores.size(); ++block) {
      if (std::isnan(scores[block])) continue;
      (scores[block] == kInfinity && is_forced(tile, static_cast<std::int64_t>(block)) ? taken : others)
          .push_back(static_cast<std::int64_t>(block));
    }
    std::stable_sort(others.begin(), others.end(), [&](std::int64_t a, std::int64_t b) {
      return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
    });
    if (static_cast<std::int64_t>(others.size()) > places) others.resize(static_cast<std::size_t>(places));
    taken.insert(taken.end(), others.begin(), others.end());
    std::sort(taken.begin(), taken.end());
    result_[Slot::selected_counts].set(list, static_cast<double>(taken.size()));
    taken.resize(static_cast<std::size_t>(nsa_.top), -1);
    for (std::int64_t i = 0; i < nsa_.top; ++i) {
      result_[Slot::selected_indices].set(list * nsa_.top + i, static_cast<double>(taken[static_cast<std::size_t>(i)]));
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
