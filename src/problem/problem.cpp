// SPDX-License-Identifier: Apache-2.0
#include "tessera/problem.h"

#include <cmath>

#include "base/checked.h"

namespace tessera {

float Problem::softmax_scale() const noexcept {
  return scale ? *scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim_qk)));
}

std::int64_t Problem::query_blocks() const noexcept { return detail::ceil_div(seqlen_q, block_q); }

std::int64_t Problem::key_blocks_first() const noexcept { return detail::ceil_div(kv.seqlen, block_kv); }

std::int64_t Problem::key_blocks() const noexcept {
  return key_blocks_first() + (kv2 ? detail::ceil_div(kv2->seqlen, block_kv) : 0);
}

std::int64_t Problem::list_heads(const TileList& of) const noexcept {
  switch (of.heads) {
    case TileList::Heads::one:
      return 1;
    case TileList::Heads::kv:
      return heads_kv;
    case TileList::Heads::q:
      break;
  }
  return heads_q;
}

}  // namespace tessera
