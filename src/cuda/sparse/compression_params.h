// SPDX-License-Identifier: Apache-2.0
// Builds the parameters of kernels for compressed keys from a problem's bindings.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/attention/params.h"
#include "operations/nsa.h"
#include "shared/nsa.h"

namespace tessera::cuda {

inline constexpr std::int64_t kMostTokens = std::numeric_limits<int>::max() / 2;
inline constexpr std::int64_t kMostGrid = 65535;  // blocks of threads in y and z

/// Compressed keys of the longest sequence.
inline std::int64_t most_blocks(const Problem& p) { return detail::compressed_blocks(p.nsa, p.kv.seqlen); }

inline bool packs_keys(const Problem& p) { return p.kv.layout == KvLayout::varlen; }

/// The most rows of compressed keys of all sequences.
inline std::int64_t pooled_capacity(const Problem& p) {
  return packs_keys(p) ? p.kv.total / p.nsa.stride : p.batch * most_blocks(p);
}

inline Support supports_tokens(const Problem& p) {
  if (std::max({p.kv.seqlen, p.kv.total, p.nsa.length, pooled_capacity(p)}) > kMostTokens) {
    return Support::no("counts tokens in 32 bits");
  }
  if (2 * p.batch > kMostGrid || p.heads_kv > kMostGrid || p.heads_q > kMostGrid) {
    return Support::no("wants at most 32767 sequences and 65535 heads");
  }
  return Support::yes();
}

inline CompressionParams compression_params(const Problem& problem, const Bindings& bindings) {
  CompressionParams p{};
  p.batch = static_cast<int>(problem.batch);
  p.seqlen = static_cast<int>(problem.kv.seqlen);
  p.total = static_cast<int>(problem.kv.total);
  p.capacity = static_cast<int>(pooled_capacity(problem));
  if (const Tensor& ends = bindings[Slot::cu_seqlens_k]) p.cu_seqlens = ends.as<int>();
  p.length = static_cast<int>(problem.nsa.length);
  p.stride = Divisor(static_cast<int>(problem.nsa.stride));
  return p;
}

inline HeadRows head_rows(const Tensor& tensor) {
  return {reinterpret_cast<char*>(tensor.bytes()), row_strides(tensor)};
}

}  // namespace tessera::cuda
