// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees. Sequence end, band and affine mask all come down to one interval of keys for each query, so
// an element test is two comparisons, and a tile needs none when it lies within the intervals of its first and last
// query.
#pragma once

#include "cuda/policy/sequence.cuh"

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
template <bool has_affine>
struct RowBounds {
  int first_query;
  int ahead;  // position of the first query less that of key 0
  int begin;  // of the first query's band, not clamped to the segment
  int end;
  int length;  // keys of the segment
  // Affine mask: the last visible key of the segment is floor((affine + query) / affine_stride) − affine_origin.
  i64 affine = 0, affine_stride = 0, affine_origin = 0;

  __device__ __forceinline__ RowBounds(const FwdParams& p, const Sequence& sequence, const Segment& segment,
                                       int query) {
    const i64 distance = sequence.q_position + query - segment.position;
    first_query = query;
    ahead = to_int(distance);
    begin = to_int(distance - p.band_left);
    end = to_int(distance + p.band_right + 1);
    length = segment.extent.length;
    if constexpr (has_affine) {
      affine = sequence.q_position + query + 1 - p.affine_length;
      affine_stride = p.affine_stride;
      affine_origin = segment.position;
    }
  }

  __device__ __forceinline__ Interval of(int query) const {
    const int below = query - first_query;
    int last = min(end + below, length);
    if constexpr (has_affine) {
      last = min(last, to_int(divide_down(affine + below, affine_stride) - affine_origin + 1));
    }
    last = max(last, 0);
    return {min(max(begin + below, 0), last), last};
  }

  /// |position of the query − position of the key|
  __device__ __forceinline__ float distance(int query, int key) const {
    return fabsf(static_cast<float>(ahead + (query - first_query) - key));
  }
};

}  // namespace tessera::cuda
