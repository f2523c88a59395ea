// SPDX-License-Identifier: Apache-2.0
// When blocks of the passes begin and end, by programmatic dependent launch.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// From the beginning of a block of a pass to its end. Blocks of a pass by keys run beside the last ones of the pass by
/// rows, which is the kernel in front and has waited for those that both passes read from. Neither reads what the other
/// writes. Who waits for the pass by keys waits for both, since that does not end before the pass by rows. CUDA
/// promises results of earlier kernels to a kernel that waits; that they are there for one whose predecessor has waited
/// is what GPUs do (docs/kernels.md, section 12).
template <BwdConfig B>
struct PassOverlap {
  static constexpr bool is_second = B.of == Gradients::keys;

  __device__ __forceinline__ PassOverlap() {
    if constexpr (!is_second) ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch();
  }
  __device__ __forceinline__ ~PassOverlap() {
    if constexpr (is_second) ptx::griddepcontrol_wait();
  }
  PassOverlap(const PassOverlap&) = delete;
  PassOverlap& operator=(const PassOverlap&) = delete;
};

}  // namespace tessera::cuda
