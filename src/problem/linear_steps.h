// SPDX-License-Identifier: Apache-2.0
// Limits of linear_decode's steps, and where their states are.
#pragma once

#include <cstdint>

#include "tessera/tensor.h"

namespace tessera::detail {

inline constexpr std::int64_t kMostStepTokens = 8;  // more belong to linear_chunk
inline constexpr std::int64_t kLongestRing = 64;    // tokens that wait beside the state

/// A sequence's slot; `otherwise` where no slots are bound. Reads host memory.
inline std::int64_t slot_at(const Tensor& slots, std::int64_t batch, std::int64_t otherwise) {
  if (!slots) return otherwise;
  return slots.dtype == DType::int64 ? slots.as<std::int64_t>()[batch] : slots.as<std::int32_t>()[batch];
}

}  // namespace tessera::detail
