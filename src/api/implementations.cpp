// SPDX-License-Identifier: Apache-2.0
// Which backends and implementations there are, and in which order a plan takes them.
#include "cpu/implementations.h"

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "cuda/implementations.h"

namespace tessera::detail {

std::span<const Implementation* const> implementations() noexcept {
  // Best first. The reference is last and is taken only by name: it is slow by design.
  static constexpr const Implementation* kTable[] = {
      &cpu::kTiled,     &cpu::kCombine,       &cpu::kKvAppend,          &cpu::kLinearDecode, &cpu::kLinearChunk,
      &cuda::kFwdWgmma, &cuda::kFwdMma,       &cuda::kBwdWgmma,         &cuda::kBwdMma,      &cuda::kCombine,
      &cuda::kKvAppend, &cuda::kLinearDecode, &cuda::kLinearChunkWgmma, &cuda::kLinearChunk, &cpu::kReference,
  };
  return kTable;
}

const Backend& backend(DeviceType device) noexcept {
  return device == DeviceType::cuda ? cuda::backend() : cpu::backend();
}

}  // namespace tessera::detail
