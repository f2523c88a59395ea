// SPDX-License-Identifier: Apache-2.0
// Interval masks. Sequence ends, windows (a causal mask is one whose right side is 0), compressed causal masks and
// chunks together give each query one interval of keys that it sees, and each key one interval of queries that see it.
// So an element test is two comparisons. Both intervals move monotonically. So a tile needs no test if it lies within
// the intervals of its first and its last line.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// What masks require of a configuration: which of them there are besides a window, which is always tested.
template <class Config>
concept MaskConfig = requires(const Config& c) {
  bool{c.compressed_causal};
  bool{c.chunked};
};

/// Keys of a segment or queries of a sequence, [begin, end).
struct Interval {
  int begin;
  int end;
};

/// Floor of a / b for b > 0.
__device__ __forceinline__ i64 divide_down(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

/// Clamps x to ±2^30, so that adding an index to it does not overflow.
__device__ __forceinline__ int to_int(i64 x) {
  constexpr i64 most = i64{1} << 30;
  return static_cast<int>(min(max(x, -most), most));
}

/// The keys of one segment that a query sees, in 32 bits relative to a first query.
template <MaskConfig auto C>
struct KeysOfQueries {
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

  __device__ __forceinline__ KeysOfQueries(const AttentionParams& p, const Sequence& sequence, const Segment& segment,
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

/// The queries that see a key of one segment, in 32 bits relative to a first key: the inverse of KeysOfQueries.
template <MaskConfig auto C>
struct QueriesOfKeys {
  int first_key;
  int begin;  // of the first key's window, not clamped to the sequence
  int end;
  int length;   // keys of the segment
  int queries;  // of the sequence
  // Compressed causal mask: all queries see keys below seen_by_all, none sees keys from seen_by_none on. The first
  // query that sees a key in between is key · compressed_stride + compressed_begin. That sum fits 64 bits; its terms
  // may not.
  int seen_by_all = 0, seen_by_none = 0;
  u64 compressed_begin = 0, compressed_stride = 0;
  // Chunks: positions of the first key and of query 0, raised so that a key's is not negative.
  WideDivisor chunk;
  u64 chunk_key = 0;
  i64 chunk_query = 0;

  QueriesOfKeys() = default;
  __device__ __forceinline__ QueriesOfKeys(const AttentionParams& p, const Sequence& sequence, const Segment& segment,
                                           int key) {
    const i64 distance = segment.position + key - sequence.q_position;
    first_key = key;
    begin = to_int(distance - p.window_right);
    end = to_int(distance + p.window_left + 1);
    length = segment.extent.length;
    queries = sequence.q.length;
    if constexpr (C.compressed_causal) {
      const i64 complete = sequence.q_position + 1 - p.compressed_length;  // at query 0
      const auto seen = [&](i64 at) { return to_int(divide_down(at, p.compressed_stride) - segment.position + 1); };
      compressed_stride = static_cast<u64>(p.compressed_stride);
      compressed_begin = static_cast<u64>(segment.position) * compressed_stride - static_cast<u64>(complete);
      seen_by_all = seen(complete);
      seen_by_none = seen(complete + queries - 1);
    }
    if constexpr (C.chunked) {
      chunk = p.chunk.size;
      chunk_key = static_cast<u64>(segment.position + key + p.chunk.above);
      chunk_query = sequence.q_position + p.chunk.above;
    }
  }

  __device__ __forceinline__ Interval of(int key) const {
    const int below = key - first_key;
    int first = key < length ? begin + below : queries;
    int last = min(end + below, queries);
    if constexpr (C.compressed_causal) {
      if (key >= seen_by_none) first = queries;
      if (key >= seen_by_all && key < seen_by_none) {
        first = max(first, to_int(static_cast<i64>(static_cast<u64>(key) * compressed_stride + compressed_begin)));
      }
    }
    if constexpr (C.chunked) {
      const u64 position = chunk_key + below;
      const i64 start = static_cast<i64>(position - ptx::remainder(position, chunk)) - chunk_query;
      first = max(first, to_int(start));
      last = min(last, to_int(start + static_cast<i64>(chunk.value)));
    }
    last = max(last, 0);
    return {min(max(first, 0), last), last};
  }
};

/// |position of a query − position of a key| for a block's queries and a tile's keys, whatever the positions. `near` is
/// the low 22 bits of the distance between the first query and the first key; adding those of the other queries and
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
  /// `near_query`: near_of() of the query; `column`: that of the key, counted from the first key.
  __device__ __forceinline__ float of(float near_query, int column) const {
    return fabsf(__fadd_rn(far, near_query - static_cast<float>(column)));
  }
};

}  // namespace tessera::cuda
