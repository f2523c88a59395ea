// SPDX-License-Identifier: Apache-2.0
// The row cuda.nsa_gate of the table: the sum of three branches, each times its gate, and its gradients.
#include <algorithm>
#include <limits>

#include "cuda/attention/params.h"
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "shared/nsa_gate.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostHeads = 65535;  // blocks in y
constexpr std::int64_t kPartRows = 128;     // of a part in a backward, at least
constexpr std::int64_t kMostBlocks = 4096;  // thread blocks of a backward: several waves on any GPU
constexpr std::int64_t kMostChunks = 16;

std::int64_t sequences(const Problem& p) { return p.q_layout == Layout::varlen ? 1 : p.batch; }
std::int64_t rows(const Problem& p) { return p.q_layout == Layout::varlen ? p.total_q : p.seqlen_q; }

GateConfig config_of(const Problem& p) {
  const bool sigmoid = p.nsa.gate == GateKind::sigmoid;
  GateConfig config;
  config.v = element_of(p.v_type);
  config.o = element_of(p.o_type);
  config.source = sigmoid ? GateSource::sigmoid : p.nsa.gate == GateKind::given ? GateSource::given : GateSource::mean;
  const std::int64_t dim = sigmoid ? std::max(p.head_dim_qk, p.head_dim_v) : p.head_dim_v;
  config.width = p.head_dim_v % 8 == 0 && (!sigmoid || p.head_dim_qk % 8 == 0) ? 8 : 1;
  while (config.lanes < 32 && config.columns() < dim) config.lanes *= 2;
  if (config.columns() / 2 >= dim) config.lanes = 8;
  if (!sigmoid) return config;
  config.q = element_of(p.q_type);
  while (p.pass == Pass::backward && config.chunks * config.columns() < p.head_dim_qk) config.chunks *= 2;
  return config;
}

Support supports(const Problem& p, const Target& target, const Wishes& /*wishes*/) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  for (const DType dtype : {p.q_type, p.v_type, p.o_type}) {
    if (!is_float(dtype)) return Support::no("has no " + std::string(to_string(dtype)) + "; want fp32, fp16 or bf16");
  }
  if (p.heads_q > kMostHeads) return Support::no("wants at most 65535 heads");
  if (sequences(p) * rows(p) > std::numeric_limits<int>::max() / 2 / std::max<std::int64_t>(p.heads_q, 1)) {
    return Support::no("counts rows of all heads in 32 bits");
  }
  const GateConfig config = config_of(p);
  const std::int64_t most = config.width == 8 ? 2 : kMostChunks;  // that registers have room for
  if (config.chunks > most) {
    return Support::no("takes head_dim_qk up to " + std::to_string(most * config.columns()) + " in a backward");
  }
  return Support::yes();
}

/// The number of parts into which a backward divides the rows of all sequences.
std::int64_t parts_of(const Problem& p) {
  const std::int64_t most = std::max<std::int64_t>(1, kMostBlocks / std::max<std::int64_t>(p.heads_q, 1));
  return std::clamp<std::int64_t>(divide_up(sequences(p) * rows(p), kPartRows), 1, most);
}

std::int64_t weights(const Problem& p) { return p.heads_q * kGates * p.head_dim_qk; }

constexpr int kSumThreads = 256;  // NsaGateSum::kThreads

KernelSource sum_source() {
  return {"nsa_gate_sum", to_string({.file = "cuda/sparse/nsa_gate_sum.cuh",
                                     .bounds = "NsaGateSum::kThreads",
                                     .parameters = {"GateSumParams params"},
                                     .call = "NsaGateSum::run(params)"})};
}

KernelSource source_of(const GateConfig& c, const std::string& family, const char* call) {
  return {family + words_of(c, Words::all), to_string({.file = "cuda/sparse/" + family + ".cuh",
                                                       .definitions = configuration_line(c),
                                                       .bounds = "config.threads()",
                                                       .parameters = {"GateParams params"},
                                                       .call = std::string(call) + "<config>::run(params)"})};
}

void plan(detail::PlanState& state) {
  const Problem& p = state.problem;
  const GateConfig config = config_of(p);
  if (p.pass == Pass::forward) {
    state.kernels = {source_of(config, "nsa_gate", "NsaGate")};
  } else {
    state.kernels = {source_of(config, "nsa_gate_gradient", "NsaGateGradient")};
    if (p.nsa.gate == GateKind::sigmoid) {
      state.kernels.push_back(sum_source());
      state.workspace_bytes = static_cast<std::size_t>(parts_of(p) * weights(p)) * sizeof(float);
    }
  }
  for (const KernelSource& source : state.kernels) state.choice += "kernel: " + source.name + "\n";
  state.prepared = config;
}

Tensor one_branch(Tensor branches) {
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(branches.rank); ++i) {
    branches.shape[i] = branches.shape[i + 1];
    branches.strides[i] = branches.strides[i + 1];
  }
  --branches.rank;
  return branches;
}

char* address(const Tensor& tensor) { return reinterpret_cast<char*>(tensor.bytes()); }

GateParams params_of(const Problem& problem, const Bindings& bindings, std::byte* workspace) {
  const bool backward = problem.pass == Pass::backward;
  const Slot output = backward ? Slot::dout : Slot::o;
  GateParams p{};
  p.branches = address(bindings[Slot::o_parts]);
  p.branch_strides = row_strides(one_branch(bindings[Slot::o_parts]));
  p.branch = bindings[Slot::o_parts].strides[0];
  p.o = address(bindings[output]);
  p.o_strides = row_strides(bindings[output]);
  p.batch = static_cast<int>(problem.batch);
  p.all_rows = static_cast<int>(sequences(problem) * rows(problem));
  p.rows = Divisor(static_cast<int>(std::max<std::int64_t>(rows(problem), 1)));
  p.heads = Divisor(static_cast<int>(problem.heads_q));
  if (const Tensor& ends = bindings[Slot::cu_seqlens_q]) p.cu_seqlens = ends.as<int>();
  p.d = static_cast<int>(problem.head_dim_qk);
  p.dv = static_cast<int>(problem.head_dim_v);
  if (problem.nsa.gate == GateKind::sigmoid) {
    p.q = address(bindings[Slot::q]);
    p.q_strides = row_strides(bindings[Slot::q]);
    const Tensor& weight = bindings[Slot::gate_weight];
    p.weight = address(weight);
    p.weight_strides[0] = weight.strides[0];
    p.weight_strides[1] = weight.strides[1];
  } else if (problem.nsa.gate == GateKind::given) {
    p.gates = bindings[Slot::gates].as<float>();
    p.gate_strides = row_strides(bindings[Slot::gates]);
  }
  if (!backward) return p;
  p.part_rows = static_cast<int>(divide_up(sequences(problem) * rows(problem), parts_of(problem)));
  p.dbranches = address(bindings[Slot::do_parts]);
  p.dbranch_strides = row_strides(one_branch(bindings[Slot::do_parts]));
  p.dbranch = bindings[Slot::do_parts].strides[0];
  if (problem.nsa.gate == GateKind::sigmoid) {
    p.dq = address(bindings[Slot::dq]);
    p.dq_strides = row_strides(bindings[Slot::dq]);
    p.partial_weights = reinterpret_cast<float*>(workspace);
  } else if (problem.nsa.gate == GateKind::given) {
    p.dgates = bindings[Slot::dgates].as<float>();
    p.dgate_strides = row_strides(bindings[Slot::dgates]);
  }
  return p;
}

/// Even without rows these kernels run, because dw must then be set to 0.
void run_backward(const Problem& problem, const Bindings& bindings, const Resources& resources, GateParams& params) {
  void* parameters[] = {&params};
  const auto parts = static_cast<std::uint32_t>(parts_of(problem));
  resources.kernels.front()->launch({parts, static_cast<std::uint32_t>(problem.heads_q)},
                                    {static_cast<std::uint32_t>(GateConfig::threads())}, 0, resources.stream.handle,
                                    parameters, Begins::early);
  if (problem.nsa.gate != GateKind::sigmoid) return;
  const Tensor& gradient = bindings[Slot::dgate_weight];
  GateSumParams sum{};
  sum.parts = params.partial_weights;
  sum.sum = gradient.as<float>();
  sum.strides[0] = gradient.strides[0];
  sum.strides[1] = gradient.strides[1];
  sum.count = static_cast<int>(weights(problem));
  sum.part_count = static_cast<int>(parts);
  sum.d = Divisor(params.d);
  parameters[0] = &sum;
  resources.kernels[1]->launch({static_cast<std::uint32_t>(divide_up(sum.count, kSumThreads))}, {kSumThreads}, 0,
                               resources.stream.handle, parameters, Begins::early);
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const std::int64_t items = sequences(problem) * rows(problem) * problem.heads_q;
  const bool forward = problem.pass == Pass::forward;
  if (items == 0 && (forward || problem.nsa.gate != GateKind::sigmoid)) return;
  GateParams params = params_of(problem, bindings, resources.workspace);
  if (!forward) return run_backward(problem, bindings, resources, params);
  const auto& config = *std::any_cast<GateConfig>(&state.prepared);
  void* parameters[] = {&params};
  resources.kernels.front()->launch(
      {static_cast<std::uint32_t>(divide_up<std::int64_t>(items, static_cast<std::int64_t>(config.groups())))},
      {static_cast<std::uint32_t>(GateConfig::threads())}, 0, resources.stream.handle, parameters, Begins::early);
}

}  // namespace

const Implementation kNsaGate = {{"cuda.nsa_gate", DeviceType::cuda, Operation::nsa_gate, supports, plan}, run};

}  // namespace tessera::cuda
