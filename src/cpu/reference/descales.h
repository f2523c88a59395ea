// SPDX-License-Identifier: Apache-2.0
// The oracle's descales of 8-bit elements, and the mean of K that it adds. Unbound tensors give 1 and 0.
#pragma once

#include "cpu/reference/number.h"
#include "tessera/problem.h"

namespace tessera::reference {

/// The offset for a row of queries, or of a tensor with their layout. `index`: in its sequence; `token`: in the tensor.
inline std::int64_t query_descale_offset(const Problem& problem, const Tensor& descales, std::int64_t batch,
                                         std::int64_t head, std::int64_t index, std::int64_t token) {
  const auto& stride = descales.strides;
  const Quantization& q = problem.quantization;
  if (q.grain == Grain::head) return batch * stride[0] + head / problem.group() * stride[1];
  if (q.grain == Grain::block) return batch * stride[0] + head * stride[1] + index / q.block * stride[2];
  if (problem.q_layout == Layout::varlen) return head * stride[0] + token * stride[1];
  return batch * stride[0] + head * stride[1] + index * stride[2];
}

inline double query_descale(const Problem& problem, const Tensor& descales, std::int64_t batch, std::int64_t head,
                            std::int64_t index, std::int64_t token) {
  if (!descales) return 1;
  return read(descales, query_descale_offset(problem, descales, batch, head, index, token));
}

/// The same for a key. `index`: in its sequence; `token`: in the tensor, page · page_size + slot if it is paged.
inline std::int64_t key_descale_offset(const Problem& problem, const Tensor& descales, std::int64_t batch,
                                       std::int64_t head, std::int64_t index, std::int64_t token) {
  const auto& stride = descales.strides;
  const Quantization& q = problem.quantization;
  const KvSource& kv = problem.kv;
  const std::int64_t step = q.grain == Grain::token ? 1 : q.block;
  if (q.grain == Grain::head) return batch * stride[0] + head * stride[1];
  if (kv.layout == KvLayout::paged_table || kv.layout == KvLayout::paged_csr) {
    return token / kv.page_size * stride[0] + head * stride[1] + token % kv.page_size / step * stride[2];
  }
  if (q.grain == Grain::token && kv.layout == KvLayout::varlen) return head * stride[0] + token * stride[1];
  return batch * stride[0] + head * stride[1] + index / step * stride[2];
}

inline double key_descale(const Problem& problem, const Tensor& descales, std::int64_t batch, std::int64_t head,
                          std::int64_t index, std::int64_t token) {
  if (!descales) return 1;
  return read(descales, key_descale_offset(problem, descales, batch, head, index, token));
}

inline double mean_of(const Tensor& means, std::int64_t batch, std::int64_t head, std::int64_t dim) {
  if (!means) return 0;
  return read(means, batch * means.strides[0] + head * means.strides[1] + dim * means.strides[2]);
}

}  // namespace tessera::reference
