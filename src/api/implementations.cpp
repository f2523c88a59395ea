// SPDX-License-Identifier: Apache-2.0
#include "plan/implementations.h"

namespace tessera::detail {

std::span<const Implementation> implementations() {
  // Best first. The reference is last and is taken only by name: it is slow by design.
  static const Implementation kTable[] = {kCpuTiled,        kCpuCombine,   kCpuKvAppend,      kCpuLinearDecode,
                                          kCpuLinearChunk,  kCudaFwdWgmma, kCudaFwdMma,       kCudaBwdMma,
                                          kCudaCombine,     kCudaKvAppend, kCudaLinearDecode, kCudaLinearChunkWgmma,
                                          kCudaLinearChunk, kCpuReference};
  return kTable;
}

}  // namespace tessera::detail
