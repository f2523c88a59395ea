// SPDX-License-Identifier: Apache-2.0
// Score and mask callables on the device: types with one static function each, chosen by the source that names the
// kernel. The built-in ones say what src/problem/callables.cpp says.
#pragma once

#include "cuda/attention/scores/extra_tensor.cuh"
#include "cuda/attention/scores/score.cuh"
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

/// The point of a row of a block and of key `key` of a segment. `work`: TileWork.
template <class Work>
__device__ __forceinline__ ScorePoint point_of(const AttentionParams& p, const Work& work, const PackedRow& at,
                                               int segment, int key) {
  return {p.batch_offset + work.block.batch, p.head_offset + work.block.head + at.head,
          work.sequence.q_position + at.query, work.sequence.segment(segment).position + key};
}

/// What a kernel compiles in: `Score::value(score, point, extras)`, in a backward `Score::derivative` of the same
/// arguments too, by the score, and `Mask::visible(point, extras)`. Built-in ones are below;
/// src/cuda/attention/scores/callable_source.cpp writes those of a user's text.
template <class Score_, class Mask_>
struct Callables {
  using Score = Score_;
  using Mask = Mask_;
};
struct NoCallable {};

/// A linear penalty on distance.
struct RelativeScore {
  static __device__ __forceinline__ float value(float score, const ScorePoint& at, const ExtraParams* /*extras*/) {
    return __fmaf_rn(-0.02F, fabsf(static_cast<float>(at.query - at.key)), score);
  }
  static __device__ __forceinline__ float derivative(float /*score*/, const ScorePoint& /*at*/,
                                                     const ExtraParams* /*extras*/) {
    return 1.0F;
  }
};

/// 4·tanh(x / 4)
struct SoftClipScore {
  static __device__ __forceinline__ float value(float score, const ScorePoint& /*at*/, const ExtraParams* /*extras*/) {
    return capped<Softcap::rational>(score, SoftcapParams(4.0F));
  }
  static __device__ __forceinline__ float derivative(float score, const ScorePoint& /*at*/,
                                                     const ExtraParams* /*extras*/) {
    return capped_derivative(score, SoftcapParams(4.0F));
  }
};

/// Documents of 40 positions; a query sees its own.
struct DocumentMask {
  static __device__ __forceinline__ bool visible(const ScorePoint& at, const ExtraParams* /*extras*/) {
    return divide_down(at.query, 40) == divide_down(at.key, 40);
  }
};

/// Squares of 8 x 8 positions, visible where the parities agree.
struct CheckerboardMask {
  static __device__ __forceinline__ bool visible(const ScorePoint& at, const ExtraParams* /*extras*/) {
    return ((at.query >> 3) + (at.key >> 3)) % 2 == 0;
  }
};

/// The first 24 positions see each other and are seen by all; the rest is causal.
struct PrefixMask {
  static __device__ __forceinline__ bool visible(const ScorePoint& at, const ExtraParams* /*extras*/) {
    return at.key < 24 || at.key <= at.query;
  }
};

}  // namespace tessera::cuda
