// SPDX-License-Identifier: Apache-2.0
// Columns of V and O that blocks share: FwdConfig::dv_parts.
#pragma once

#include "shared/config.h"
#include "shared/params.h"

namespace tessera::cuda {

/// The problem of one of the blocks that share the columns of V and O: its own columns. The first writes the LSE.
template <FwdConfig C, class Params>
__device__ __forceinline__ Params column_part(const Params& whole) {
  const int first = static_cast<int>(blockIdx.x % C.dv_parts) * C.dv;
  Params p = whole;
  p.dv = min(p.dv - first, C.dv);
  p.o = static_cast<char*>(p.o) + first * bytes_of(C.output);
  if constexpr (C.residual) p.o_residual += first;
  if (first != 0) {
    p.lse = nullptr;
    p.row_sums = nullptr;
  }
#pragma unroll
  for (int i = 0; i < C.segments; ++i) p.kv[i].v = static_cast<const char*>(p.kv[i].v) + first * bytes_of(C.type);
  return p;
}

}  // namespace tessera::cuda
