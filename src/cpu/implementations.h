// SPDX-License-Identifier: Apache-2.0
// The CPU's implementations, and how they run.
#pragma once

#include <cstddef>

#include "base/parallel.h"
#include "plan/implementations.h"

namespace tessera::cpu {

/// What a run may use besides its bindings.
struct Resources {
  std::byte* workspace;  // workspace_bytes, 64-byte aligned
  detail::Workers& workers;
};

struct Implementation : detail::Implementation {
  void (*run)(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);
};

extern const Implementation kTiled;         // forward/tiled.cpp
extern const Implementation kCombine;       // forward/combine.cpp
extern const Implementation kKvAppend;      // cache/kv_append.cpp
extern const Implementation kLinearDecode;  // linear/linear_decode.cpp
extern const Implementation kLinearChunk;   // linear/linear_chunk.cpp
extern const Implementation kNsaPool;       // sparse/nsa_pool.cpp
extern const Implementation kNsaSelect;     // sparse/nsa_select.cpp
extern const Implementation kNsaGate;       // sparse/nsa_gate.cpp
extern const Implementation kQuantize;      // quantize/quantize.cpp
extern const Implementation kReference;     // reference/implementation.cpp

/// Best first. The reference is taken only by name: it is slow by design.
inline constexpr const detail::Implementation* kImplementations[] = {
    &kTiled,   &kCombine,   &kKvAppend, &kLinearDecode, &kLinearChunk,
    &kNsaPool, &kNsaSelect, &kNsaGate,  &kQuantize,     &kReference};

}  // namespace tessera::cpu
