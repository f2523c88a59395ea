// SPDX-License-Identifier: Apache-2.0
// CUDA's rows of the table of implementations, and how they run.
#pragma once

#include <cstddef>
#include <span>

#include "plan/implementations.h"

namespace tessera::cuda {

class Kernel;
using detail::KernelSource;

/// What a run may use besides its bindings.
struct Resources {
  std::byte* workspace;  // workspace_bytes, 64-byte aligned
  Stream stream;
  // PlanState::kernels of the implementation, in their order, loaded into the calling thread's current context, which
  // is one of the target's device.
  std::span<const Kernel* const> kernels;
};

struct Implementation : detail::Implementation {
  void (*run)(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);
};

extern const Implementation kFwdWgmma;          // attention/forward/wgmma.cpp
extern const Implementation kFwdMma;            // attention/forward/mma.cpp
extern const Implementation kFwdDecode;         // attention/decode/decode.cpp
extern const Implementation kBwdWgmma;          // attention/backward/wgmma.cpp
extern const Implementation kBwdMma;            // attention/backward/mma.cpp
extern const Implementation kCombine;           // attention/splits/combine.cpp
extern const Implementation kKvAppend;          // cache/kv_append.cpp
extern const Implementation kQuantize;          // quantize/quantize.cpp
extern const Implementation kLinearDecode;      // linear/linear_decode.cpp
extern const Implementation kLinearChunkWgmma;  // linear/linear_chunk.cpp
extern const Implementation kLinearChunk;
extern const Implementation kNsaPool;    // sparse/nsa_pool.cpp
extern const Implementation kNsaSelect;  // sparse/nsa_select.cpp
extern const Implementation kNsaGate;    // sparse/nsa_gate.cpp

/// In order of preference.
inline constexpr const detail::Implementation* kImplementations[] = {
    &kFwdWgmma, &kFwdDecode,    &kFwdMma,           &kBwdWgmma,    &kBwdMma,  &kCombine,   &kKvAppend,
    &kQuantize, &kLinearDecode, &kLinearChunkWgmma, &kLinearChunk, &kNsaPool, &kNsaSelect, &kNsaGate};

}  // namespace tessera::cuda
