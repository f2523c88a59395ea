// SPDX-License-Identifier: Apache-2.0
// The ordered table of implementations. make_plan walks it from the top and takes the first row that supports the
// problem on the target and can meet the wishes; every refusal keeps its reason for Plan::explain().
#pragma once

#include <any>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/slot_rules.h"
#include "cuda/jit/compile.h"
#include "problem/registered_callables.h"
#include "tessera/executor.h"
#include "tessera/plan.h"

namespace tessera::cuda {
class Kernel;
}

namespace tessera::detail {

struct Implementation;
class Workers;

/// Everything a plan decided. Filled by make_plan and by the implementation's plan(); read-only afterwards.
struct PlanState {
  Problem problem;
  Target target;  // threads resolved (never 0), isa resolved (never "")
  Wishes wishes;
  RegisteredCallables callables;  // that the problem names
  SlotRules rules;                // of the problem: what its bindings must be
  const Implementation* implementation = nullptr;
  std::string implementation_name;
  std::vector<Candidate> candidates;
  std::size_t workspace_bytes = 0;
  // Choices of the tiled CPU implementation; 0 where they do not apply.
  std::int64_t tile_q = 0;    // query rows a tile, all heads of a group together
  std::int64_t tile_kv = 0;   // keys a tile
  std::int64_t splits = 1;    // parts of the KV sequence
  bool shared_group = false;  // one packed K/V tile serves all heads of a group
  std::string choice;         // the choices and their reasons, one line each, for explain()
  // What run() launches on a GPU, in the order in which Resources has them loaded; for `tessera compile` too.
  std::vector<cuda::KernelSource> kernels;
  std::any prepared;  // what run() needs and bindings do not change, of a type of the implementation's own
};

/// Whether the last of the plan's kernels checks metadata in front of the others, which clamp: Executor launches it.
inline bool reports_metadata(const PlanState& state) noexcept {
  return state.problem.metadata == Metadata::report && state.target.device == DeviceType::cuda;
}

/// What a run may use besides its bindings.
struct Resources {
  std::byte* workspace = nullptr;  // workspace_bytes, 64-byte aligned
  Stream stream;
  // PlanState::kernels of the implementation, loaded into the calling thread's current context, which is one of the
  // target's device.
  std::span<const cuda::Kernel* const> kernels;
  Workers* workers = nullptr;  // cpu
};

struct Implementation {
  const char* name;
  DeviceType device;
  std::optional<Operation> operation;  // the only one; nullopt: each
  // For a target and a problem of these.
  Support (*supports)(const Problem& problem, const Target& target, const Wishes& wishes);
  void (*plan)(PlanState& state);  // fills the choices, workspace_bytes and kernels
  void (*run)(const PlanState& state, const Bindings& bindings, const Resources& resources);
  std::optional<Pass> pass{};  // of attention, the only one; nullopt: both
};

/// cpu.tiled, cpu.combine, cpu.kv_append, cpu.linear_decode, cpu.linear_chunk, cuda.fwd_wgmma, cuda.fwd_mma,
/// cuda.bwd_mma, cuda.combine, cuda.kv_append, cuda.linear_decode, cuda.linear_chunk_wgmma, cuda.linear_chunk,
/// cpu.reference (the last only when wished for by name).
std::span<const Implementation> implementations();

// One row each; defined by the backends.
extern const Implementation kCpuTiled;              // src/cpu/forward/tiled.cpp
extern const Implementation kCpuCombine;            // src/cpu/forward/combine.cpp
extern const Implementation kCpuKvAppend;           // src/cpu/cache/kv_append.cpp
extern const Implementation kCpuLinearDecode;       // src/cpu/linear/linear_decode.cpp
extern const Implementation kCpuLinearChunk;        // src/cpu/linear/linear_chunk.cpp
extern const Implementation kCudaFwdMma;            // src/cuda/attention/forward/mma.cpp
extern const Implementation kCudaFwdWgmma;          // src/cuda/attention/forward/wgmma.cpp
extern const Implementation kCudaBwdMma;            // src/cuda/attention/backward/mma.cpp
extern const Implementation kCudaCombine;           // src/cuda/attention/splits/combine.cpp
extern const Implementation kCudaKvAppend;          // src/cuda/cache/kv_append.cpp
extern const Implementation kCudaLinearDecode;      // src/cuda/linear/linear_decode.cpp
extern const Implementation kCudaLinearChunkWgmma;  // src/cuda/linear/linear_chunk.cpp
extern const Implementation kCudaLinearChunk;
extern const Implementation kCpuReference;  // src/cpu/reference/implementation.cpp

}  // namespace tessera::detail
