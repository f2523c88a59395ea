// SPDX-License-Identifier: Apache-2.0
// A tensor that the text of a score or mask reads element by element, as name(i, j).
#pragma once

#include "cuda/ptx/convert.cuh"
#include "shared/params.h"

namespace tessera::cuda {

enum class ExtraType : unsigned char { fp32, fp16, bf16, int32, int64, uint8 };

/// Indices outside of the tensor are clamped, whatever the problem's metadata mode: scores beyond the ends of a
/// sequence are computed with the others of their tile, and dropped.
template <ExtraType type, int rank>
struct ExtraTensor {
  const ExtraParams& p;

  template <class... Index>
  __device__ __forceinline__ auto operator()(Index... index) const {
    static_assert(sizeof...(Index) == rank, "an extra tensor wants as many indices as it has dimensions");
    i64 element = 0;
    [[maybe_unused]] int d = 0;
    ((element += offset(d, inside(index, p.sizes[d])), ++d), ...);
    return read(element);
  }

 private:
  template <class Index>
  static __device__ __forceinline__ i64 inside(Index index, i64 size) {
    return max(min(static_cast<i64>(index), size - 1), i64{0});
  }
  // This version computes in 32 bits, since operations on 64 bits take twice as many instructions.
  static __device__ __forceinline__ int inside(int index, i64 size) {
    constexpr i64 most = 0x7fffffff;
    return max(min(index, static_cast<int>(min(size - 1, most))), 0);
  }
  __device__ __forceinline__ i64 offset(int d, i64 index) const { return d + 1 < rank ? index * p.strides[d] : index; }
  template <class T>
  __device__ __forceinline__ T element_of(i64 element) const {
    return static_cast<const T*>(p.data)[element];
  }
  __device__ __forceinline__ auto read(i64 element) const {
    if constexpr (type == ExtraType::fp32) return element_of<float>(element);
    if constexpr (type == ExtraType::int32) return element_of<int>(element);
    if constexpr (type == ExtraType::int64) return element_of<i64>(element);
    if constexpr (type == ExtraType::uint8) return element_of<unsigned char>(element);
    if constexpr (type == ExtraType::fp16 || type == ExtraType::bf16) {
      float low = 0.0F;
      float high = 0.0F;
      ptx::unpack<type == ExtraType::fp16 ? Element::fp16 : Element::bf16>(element_of<unsigned short>(element), low,
                                                                           high);
      return low;
    }
  }
};

}  // namespace tessera::cuda
