// SPDX-License-Identifier: Apache-2.0
// The oracle's nsa_pool: block after block, token after token.
#include <algorithm>
#include <numeric>
#include <random>

#include "cpu/reference/linear.h"
#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "cpu/reference/sequences.h"

namespace tessera::reference {
namespace {

/// The slots of tensors that are made from K, or from V.
struct Side {
  Slot tokens, pooled, projection, dtokens, dpooled, dprojection;
  DType dtype;
  std::int64_t dim;
};

template <class Real>
class Pool {
 public:
  Pool(const Problem& problem, const Bindings& bindings, Result& result, std::uint32_t order)
      : p_(problem), bindings_(bindings), result_(result), order_(order) {}

  void run() {
    const Sequences sequences = resolve_sequences(p_, bindings_);
    const Side sides[] = {{Slot::k, Slot::k_pooled, Slot::k_projection, Slot::dk, Slot::dk_pooled, Slot::dk_projection,
                           p_.k_type, p_.head_dim_qk},
                          {Slot::v, Slot::v_pooled, Slot::v_projection, Slot::dv, Slot::dv_pooled, Slot::dv_projection,
                           p_.v_type, p_.head_dim_v}};
    const bool packed = p_.kv.layout == KvLayout::varlen;
    const std::int64_t rows = packed ? p_.kv.total / p_.nsa.stride : p_.batch * blocks_of(p_.kv.seqlen);
    for (const Side& side : sides) {
      if (p_.pass == Pass::forward) {
        result_[side.pooled].resize(rows * p_.heads_kv * side.dim);
      } else {
        result_[side.dtokens].resize(sequences.key_tokens[0] * p_.heads_kv * side.dim);
        if (p_.nsa.project) result_[side.dprojection].resize(p_.heads_kv * side.dim * side.dim);
      }
    }
    if (packed && p_.pass == Pass::forward) {
      result_[Slot::cu_blocks].resize(p_.batch + 1);
      result_[Slot::cu_blocks].set(0, 0);
    }
    for (const Side& side : sides) {
      dprojection_.assign(static_cast<std::size_t>(p_.heads_kv * side.dim * side.dim), 0);
      std::int64_t first_block = 0;
      for (std::int64_t b = 0; b < p_.batch; ++b) {
        const Rows& tokens = sequences.keys[0][static_cast<std::size_t>(b)];
        const std::int64_t blocks = blocks_of(tokens.length);
        if (!result_[Slot::cu_blocks].values.empty()) {
          result_[Slot::cu_blocks].set(b + 1, static_cast<double>(first_block + blocks));
        }
        for (std::int64_t h = 0; h < p_.heads_kv; ++h) {
          if (p_.pass == Pass::forward) {
            forward(side, tokens, first_block, blocks, h);
          } else {
            backward(side, tokens, first_block, blocks, h);
          }
        }
        first_block += blocks;
      }
      if (p_.pass == Pass::backward && p_.nsa.project) {
        for (std::size_t i = 0; i < dprojection_.size(); ++i) {
          put(side.dprojection, static_cast<std::int64_t>(i), dprojection_[i]);
        }
      }
    }
  }

 private:
  using Row = std::vector<Real>;

  [[nodiscard]] std::int64_t blocks_of(std::int64_t tokens) const {
    std::int64_t blocks = 0;
    while (blocks * p_.nsa.stride + p_.nsa.length <= tokens) ++blocks;
    return blocks;
  }

  void forward(const Side& side, const Rows& tokens, std::int64_t first_block, std::int64_t blocks, std::int64_t h) {
    for (std::int64_t j = 0; j < blocks; ++j) {
      Row row = mean(side, tokens, j, h);
      if (p_.nsa.project) row = times_projection(side, row, h, false);
      for (std::int64_t c = 0; c < side.dim; ++c) {
        put(side.pooled, ((first_block + j) * p_.heads_kv + h) * side.dim + c, row[static_cast<std::size_t>(c)]);
      }
    }
  }

  void backward(const Side& side, const Rows& tokens, std::int64_t first_block, std::int64_t blocks, std::int64_t h) {
    std::vector<Row> gradients(static_cast<std::size_t>(tokens.length), Row(static_cast<std::size_t>(side.dim)));
    for (const std::int64_t j : shuffled(blocks)) {
      const Tensor& incoming = bindings_[side.dpooled];
      Row gradient(static_cast<std::size_t>(side.dim));
      const std::int64_t at = token_offset(incoming, first_block + j, h);
      for (std::int64_t c = 0; c < side.dim; ++c) gradient[static_cast<std::size_t>(c)] = number(incoming, at + c);
      if (p_.nsa.project) {
        const Row of_block = mean(side, tokens, j, h);
        for (std::int64_t r = 0; r < side.dim; ++r) {
          add_scaled(&dprojection_[static_cast<std::size_t>((h * side.dim + r) * side.dim)],
                     of_block[static_cast<std::size_t>(r)], gradient.data(), gradient.size());
        }
        gradient = times_projection(side, gradient, h, true);
      }
      for (std::int64_t t = 0; t < p_.nsa.length; ++t) {
        add_scaled(gradients[static_cast<std::size_t>(j * p_.nsa.stride + t)].data(),
                   Real(1) / static_cast<Real>(p_.nsa.length), gradient.data(), gradient.size());
      }
    }
    for (std::int64_t t = 0; t < tokens.length; ++t) {
      for (std::int64_t c = 0; c < side.dim; ++c) {
        put(side.dtokens, ((tokens.first_token + t) * p_.heads_kv + h) * side.dim + c,
            gradients[static_cast<std::size_t>(t)][static_cast<std::size_t>(c)]);
      }
    }
  }

  [[nodiscard]] Row mean(const Side& side, const Rows& tokens, std::int64_t block, std::int64_t h) const {
    const Tensor& tensor = bindings_[side.tokens];
    Row sum(static_cast<std::size_t>(side.dim));
    for (const std::int64_t t : shuffled(p_.nsa.length)) {
      const std::int64_t at = token_offset(tensor, tokens.first_token + block * p_.nsa.stride + t, h);
      for (std::int64_t c = 0; c < side.dim; ++c) sum[static_cast<std::size_t>(c)] += number(tensor, at + c);
    }
    for (Real& x : sum) x /= static_cast<Real>(p_.nsa.length);
    return sum;
  }

  [[nodiscard]] Row times_projection(const Side& side, const Row& row, std::int64_t h, bool transposed) const {
    const Tensor& matrix = bindings_[side.projection];
    Row out(static_cast<std::size_t>(side.dim));
    for (std::int64_t c = 0; c < side.dim; ++c) {
      for (const std::int64_t r : shuffled(side.dim)) {
        const std::int64_t from = transposed ? c : r;
        const std::int64_t to = transposed ? r : c;
        out[static_cast<std::size_t>(c)] +=
            row[static_cast<std::size_t>(r)] *
            number(matrix, h * matrix.strides[0] + from * matrix.strides[1] + to * matrix.strides[2]);
      }
    }
    return out;
  }

  [[nodiscard]] std::vector<std::int64_t> shuffled(std::int64_t count) const {
    std::vector<std::int64_t> list(static_cast<std::size_t>(count));
    std::iota(list.begin(), list.end(), 0);
    if (order_ != 0) std::shuffle(list.begin(), list.end(), std::mt19937(order_));
    return list;
  }
  [[nodiscard]] static Real number(const Tensor& tensor, std::int64_t at) {
    return static_cast<Real>(read(tensor, at));
  }
  void put(Slot to, std::int64_t index, Real value) {
    put_result<Real>(result_[to], bindings_[to].dtype, index, static_cast<double>(value));
  }

  const Problem& p_;
  const Bindings& bindings_;
  Result& result_;
  std::uint32_t order_;
  std::vector<Real> dprojection_;
};

}  // namespace

template <>
void compute_operation<Operation::nsa_pool>(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic,
                                            std::uint32_t order, Result& result) {
  if (arithmetic == Arithmetic::oracle) {
    Pool<double>(problem, bindings, result, order).run();
  } else {
    Pool<float>(problem, bindings, result, order).run();
  }
}

}  // namespace tessera::reference
