// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees. Sequence end, window, compressed causal mask and chunks all come down to one interval of
// keys for each query, so an element test is two comparisons, and a tile needs none when it lies within the intervals
// of its first and last query.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/math.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// Keys [begin, end) of a segment.
struct Interval {
  int begin;
  int end;
};

/// Floor of a / b for b > 0.
__device__ __forceinline__ i64 divide_down(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

/// Far enough from every index that sums of two still fit.
__device__ __forceinline__ int to_int(i64 x) {
  constexpr i64 most = i64{1} << 30;
  return static_cast<int>(min(max(x, -most), most));
}

/// The intervals of a block's queries in one segment, in 32 bits from the block's first query on.
template <FwdConfig C>
struct RowBounds {
  int first_query;
  int begin;  // of the first query's window, not clamped to the segment
  int end;
  int length;  // keys of the segment
  // Compressed causal mask: the last visible key of the segment is floor((compressed_end + query) / compressed_stride)
  // − compressed_origin.
  i64 compressed_end = 0, compressed_stride = 0, compressed_origin = 0;
  // Chunks: positions of the first query and of key 0, raised so that a query's is not negative.
  WideDivisor chunk;
  u64 chunk_query = 0;
  i64 chunk_key = 0;

  RowBounds() = default;
  __device__ __forceinline__ RowBounds(const FwdParams& p, const Sequence& sequence, const Segment& segment,
                                       int query) {
    const i64 distance = sequence.q_position + query - segment.position;
    first_query = query;
    begin = to_int(distance - p.window_left);
    end = to_int(distance + p.window_right + 1);
    length = segment.extent.length;
    if constexpr (C.compressed_causal) {
      compressed_end = sequence.q_position + query + 1 - p.compressed_length;
      compressed_stride = p.compressed_stride;
      compressed_origin = segment.position;
    }
    if constexpr (C.chunked) {
      chunk = p.chunk.size;
      chunk_query = static_cast<u64>(sequence.q_position + query + p.chunk.above);
      chunk_key = segment.position + p.chunk.above;
    }
  }

  __device__ __forceinline__ Interval of(int query) const {
    const int below = query - first_query;
    int last = min(end + below, length);
    if constexpr (C.compressed_causal) {
      last = min(last, to_int(divide_down(compressed_end + below, compressed_stride) - compressed_origin + 1));
    }
    int first = begin + below;
    if constexpr (C.chunked) {
      const u64 position = chunk_query + below;
      const i64 start = static_cast<i64>(position - ptx::remainder(position, chunk)) - chunk_key;
      first = max(first, to_int(start));
      last = min(last, to_int(start + static_cast<i64>(chunk.value)));
    }
    last = max(last, 0);
    return {min(max(first, 0), last), last};
  }
};

/// |position of a query − position of a key| for a block's queries and a tile's keys, whatever the positions. Of the
/// distance between the first query and the first key, `near` is the low 22 bits; adding those of the other queries and
/// keys to it is exact in fp32. `far` is the rest, exact up to 2^46. So only their sum is rounded, and a pair's
/// distance does not depend on the tile.
struct Distances {
  int first_query;
  int near;
  float far;

  __device__ __forceinline__ Distances(const Sequence& sequence, const Segment& segment, int query, int key)
      : first_query(query) {
    constexpr int low = (1 << 22) - 1;
    const i64 ahead = sequence.q_position + query - segment.position - key;
    near = static_cast<int>(ahead) & low;
    far = static_cast<float>(ahead - near);
  }

  __device__ __forceinline__ float near_of(int query) const { return static_cast<float>(near + query - first_query); }
  /// `near_query`: near_of() the query; `column`: of the key, counted from the first one.
  __device__ __forceinline__ float of(float near_query, int column) const {
    return fabsf(__fadd_rn(far, near_query - static_cast<float>(column)));
  }
};

}  // namespace tessera::cuda
