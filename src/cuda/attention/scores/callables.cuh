// SPDX-License-Identifier: Apache-2.0
// Score and mask callables on the device: types with static functions; the source of a kernel names those that it uses.
// The built-in ones compute what those of src/problem/callables.cpp compute.
#pragma once

#include "cuda/attention/scores/extra_tensor.cuh"
#include "cuda/attention/scores/score.cuh"
#include "cuda/attention/scores/text_functions.cuh"
#include "cuda/attention/tiles/mask.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"

namespace tessera::cuda {

/// Where an element of the score matrix is. All are positions (index + offset), not indices.
struct ScorePoint {
  i64 batch;
  i64 head;
  i64 query;
  i64 key;
};

/// Returns the point of a row of a block and of the key at position `key`. `work`: TileWork.
template <class Work>
__device__ __forceinline__ ScorePoint point_of(const AttentionParams& p, const Work& work, const PackedRow& at,
                                               i64 key) {
  return {p.batch_offset + work.block.batch, p.head_offset + work.block.head + at.head,
          work.sequence.q_position + at.query, key};
}

/// Whether positions are small. Those of all queries and of the segment's keys are from −2^21 to 2^21, and so are those
/// that a tile has beyond the ends; batch and head are from −2^22 to 2^22. The result is uniform in a block.
__device__ __forceinline__ bool are_positions_small(const AttentionParams& p, i64 first_query, int queries,
                                                    const Segment& keys) {
  constexpr i64 most = i64{1} << 21;
  constexpr int beyond = 4096;
  const auto raised = [](i64 position) { return static_cast<u64>(position + most); };
  const u64 all = raised(first_query) | raised(first_query + queries + beyond) | raised(keys.position) |
                  raised(keys.position + keys.extent.length + beyond) | raised(p.batch_offset) | raised(p.head_offset);
  return all < static_cast<u64>(2 * most);
}

/// The callables of a kernel. It calls `Score::value<Position>(score, point, extras)`; in a backward also
/// `Score::derivative`, with respect to the score, with the same arguments; and `Mask::visible<Position>(point,
/// extras)`. `Position` is the integer type in which they may compute: `int` if positions are small, else i64;
/// `uses_position` says whether they use it. The built-in ones are below; src/cuda/attention/scores/callable_source.cpp
/// writes those of a user's text.
template <class Score_, class Mask_>
struct Callables {
  using Score = Score_;
  using Mask = Mask_;
};
struct NoCallable {
  static constexpr bool uses_position = false;
};

/// A linear penalty on distance.
struct RelativeScore {
  static constexpr bool uses_position = true;
  template <class Position>
  static __device__ __forceinline__ float value(float score, const ScorePoint& at, const ExtraParams* /*extras*/) {
    return __fmaf_rn(-0.02F, fabsf(float_of_small(Position(at.query) - Position(at.key))), score);
  }
  template <class Position>
  static __device__ __forceinline__ float derivative(float /*score*/, const ScorePoint& /*at*/,
                                                     const ExtraParams* /*extras*/) {
    return 1.0F;
  }
};

/// 4·tanh(x / 4)
struct SoftClipScore {
  static constexpr bool uses_position = false;
  template <class Position>
  static __device__ __forceinline__ float value(float score, const ScorePoint& /*at*/, const ExtraParams* /*extras*/) {
    return capped<Softcap::rational>(score, SoftcapParams(4.0F));
  }
  template <class Position>
  static __device__ __forceinline__ float derivative(float score, const ScorePoint& /*at*/,
                                                     const ExtraParams* /*extras*/) {
    return capped_derivative(score, SoftcapParams(4.0F));
  }
};

/// Documents of 40 positions; a query sees its own.
struct DocumentMask {
  static constexpr bool uses_position = true;
  template <class Position>
  static __device__ __forceinline__ bool visible(const ScorePoint& at, const ExtraParams* /*extras*/) {
    constexpr int raise = (1 << 21) / 40 + 1;
    return quotient_of_raised<raise>(Position(at.query), Position(40)) ==
           quotient_of_raised<raise>(Position(at.key), Position(40));
  }
};

/// Squares of 8 x 8 positions, visible where the parities agree.
struct CheckerboardMask {
  static constexpr bool uses_position = true;
  template <class Position>
  static __device__ __forceinline__ bool visible(const ScorePoint& at, const ExtraParams* /*extras*/) {
    return ((Position(at.query) >> 3) + (Position(at.key) >> 3)) % 2 == 0;
  }
};

/// The first 24 positions see each other and are seen by all; the rest is causal.
struct PrefixMask {
  static constexpr bool uses_position = true;
  template <class Position>
  static __device__ __forceinline__ bool visible(const ScorePoint& at, const ExtraParams* /*extras*/) {
    return Position(at.key) < 24 || Position(at.key) <= Position(at.query);
  }
};

}  // namespace tessera::cuda
