// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch of the passes.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// Lives from the beginning of a block of a pass to its end. Blocks of the key pass run beside the last blocks of the
/// row pass before it. They begin without a wait, because the row pass has waited for the kernels whose results both
/// passes read, and neither pass reads what the other writes. They wait for the row pass before they end, so a kernel
/// that waits for the key pass waits for both. CUDA guarantees the results of earlier kernels only to a kernel that
/// waits itself. That they are visible if only its predecessor has waited is how GPUs behave (docs/kernels.md, section
/// 12).
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
