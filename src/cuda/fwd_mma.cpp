// SPDX-License-Identifier: Apache-2.0
// The row cuda.fwd_mma of the table: what it supports, the configuration it chooses, its launch.
#include <algorithm>
#include <limits>

#include "core/implementations.h"
#include "cuda/fwd_params.h"
#include "cuda/jit/kernel.h"
#include "shared/config.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostRowStride = std::int64_t{1} << 24;  // elements; offsets within a tile are 32-bit
constexpr std::int64_t kMostGrid = 65535;                       // blocks in y and z

bool is_paged(const KvSource& source) {
  return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
}

Element element_of(DType dtype) {
  return dtype == DType::fp32 ? Element::fp32 : dtype == DType::fp16 ? Element::fp16 : Element::bf16;
}

// Head dims that have configurations of their own; others run padded to the next.
int padded_dim(std::int64_t dim) {
  for (const int size : {32, 64, 96, 128, 192, 256}) {
    if (dim <= size) return size;
  }
  return 0;
}

// Measured on an H200 over S 512 to 8192 (docs/performance.md): 32 rows a warp wherever O's registers leave room for
// them, because every fragment of K and V then serves two products. Narrower tiles where more than the plainest softmax
// needs registers too.
void choose_tile(FwdConfig& config) {
  const int widest = std::max(config.d, config.dv);
  const bool plain = !config.scale_first && config.source == Source::strided && config.output == config.type;
  config.tile_m = widest <= 128 ? 128 : 64;
  config.tile_n = widest <= 64 ? (plain ? 128 : 80) : widest <= 128 ? (plain ? 64 : 48) : 64;
  config.stages = widest <= 128 && config.source == Source::strided ? 2 : 1;
}

FwdConfig config_of(const Problem& problem) {
  FwdConfig config;
  config.type = element_of(problem.q_type);
  config.output = element_of(problem.o_type);
  config.d = padded_dim(problem.head_dim_qk);
  config.dv = padded_dim(problem.head_dim_v);
  config.source = is_paged(problem.kv) ? Source::paged : Source::strided;
  config.segments = problem.kv2 ? 2 : 1;
  config.affine = problem.affine.has_value();
  config.softcap = problem.softcap > 0.0F;
  config.alibi = problem.alibi;
  config.scale_first = config.softcap || config.alibi || !(problem.softmax_scale() > 0.0F);
  choose_tile(config);
  return config;
}

FwdConfig config_of(const Problem& problem, const Target& target) {
  FwdConfig config = config_of(problem);
  // Two blocks share a multiprocessor. The driver keeps 1 KB for each; a multiprocessor has 1 KB more than a block may
  // ask for.
  if (2 * (config.smem_bytes() + 1024) > target.shared_memory + 1024) config.stages = 1;
  return config;
}

Support supports_features(const Problem& p) {
  if (p.operation != Operation::attention || p.pass != Pass::forward) return Support::no("does the forward only");
  if (p.q_type != p.k_type || p.q_type != p.v_type || (p.q_type != DType::bf16 && p.q_type != DType::fp16)) {
    return Support::no("wants q, k and v of one type, bf16 or fp16");
  }
  if (p.o_type != p.q_type && p.o_type != DType::fp32) return Support::no("writes o in q's type or fp32");
  if (std::max(p.head_dim_qk, p.head_dim_v) > 256) return Support::no("head dims end at 256");
  if (p.list || p.next != TileList::Form::none || p.mass != MassKind::none) {
    return Support::no("has no tile lists and no tile mass yet");
  }
  if (p.dropout > 0.0F) return Support::no("has no dropout yet");
  if (!p.score.empty() || !p.mask.empty()) return Support::no("has no score or mask callables yet");
  if (p.metadata == Metadata::report) return Support::no("clamps metadata without a report yet");
  if (p.kv2 && is_paged(*p.kv2) != is_paged(p.kv)) return Support::no("wants both segments paged, or neither");
  return Support::yes();
}

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (target.device != DeviceType::cuda) return Support::no("runs on CUDA; the target is " + target.to_string());
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  if (const Support s = supports_features(problem); !s) return s;
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 2;
  if (problem.seqlen_q * (problem.heads_q / problem.heads_kv) > most || problem.kv.seqlen > most ||
      problem.total_q > most || problem.kv.total > most) {
    return Support::no("counts rows of a sequence in 32 bits");
  }
  if (problem.batch > kMostGrid || problem.heads_kv > kMostGrid) {
    return Support::no("wants at most 65535 sequences and key heads");
  }
  const FwdConfig config = config_of(problem, target);
  if (config.smem_bytes() > target.shared_memory) {
    return Support::no("needs " + std::to_string(config.smem_bytes()) + " bytes of shared memory; the target has " +
                       std::to_string(target.shared_memory));
  }
  const auto fixed = [](const char* name, const std::optional<std::int64_t>& wish, std::int64_t value) {
    if (!wish || *wish == value) return Support::yes();
    return Support::no(std::string(name) + " is " + std::to_string(*wish) + "; want " + std::to_string(value));
  };
  if (const Support s = fixed("tile_q", wishes.tile_q, config.tile_m); !s) return s;
  if (const Support s = fixed("tile_kv", wishes.tile_kv, config.tile_n); !s) return s;
  return fixed("splits", wishes.splits, 1);
}

const char* name_of(Element element) {
  return element == Element::fp32 ? "fp32" : element == Element::fp16 ? "fp16" : "bf16";
}

KernelSource source_of(const FwdConfig& c) {
  const auto flag = [](const char* name, bool on) {
    return on ? std::string(", .") + name + " = true" : std::string();
  };
  KernelSource source;
  source.name = "fwd_mma " + std::string(name_of(c.type)) + " d=" + std::to_string(c.d) + ":" + std::to_string(c.dv) +
                " tile=" + std::to_string(c.tile_m) + "x" + std::to_string(c.tile_n) +
                " stages=" + std::to_string(c.stages) + (c.q_kept > 0 ? " q_kept=" + std::to_string(c.q_kept) : "") +
                (c.output == c.type ? "" : " out=fp32") + (c.source == Source::paged ? " paged" : "") +
                (c.segments == 2 ? " segments=2" : "") + (c.affine ? " affine" : "") + (c.softcap ? " softcap" : "") +
                (c.alibi ? " alibi" : "") + (c.scale_first ? " scale_first" : "");
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.text =
      "#include \"cuda/kernels/fwd_mma.cuh\"\n"
      "using namespace tessera::cuda;\n"
      "constexpr FwdConfig config{.type = Element::" +
      std::string(name_of(c.type)) + ", .output = Element::" + name_of(c.output) + ", .d = " + std::to_string(c.d) +
      ", .dv = " + std::to_string(c.dv) + ", .tile_m = " + std::to_string(c.tile_m) +
      ", .tile_n = " + std::to_string(c.tile_n) + ", .warps = " + std::to_string(c.warps) +
      ", .stages = " + std::to_string(c.stages) + (c.q_kept > 0 ? ", .q_kept = " + std::to_string(c.q_kept) : "") +
      (c.source == Source::paged ? ", .source = Source::paged" : "") + (c.segments == 2 ? ", .segments = 2" : "") +
      flag("scale_first", c.scale_first) + flag("affine", c.affine) + flag("softcap", c.softcap) +
      flag("alibi", c.alibi) +
      "};\n"
      "extern \"C\" __global__ void __launch_bounds__(config.threads()) "
      "tessera_kernel(const __grid_constant__ FwdParams params) {\n"
      "  extern __shared__ __align__(1024) char memory[];\n"
      "  FwdMma<config>::run(params, memory);\n"
      "}\n";
  return source;
}

void plan(detail::PlanState& state) {
  const FwdConfig config = config_of(state.problem, state.target);
  state.tile_q = config.tile_m;
  state.tile_kv = config.tile_n;
  state.workspace_bytes = 0;
  state.kernels = {source_of(config)};
  state.choice = "kernel: " + state.kernels.front().name + "\nshared memory: " + std::to_string(config.smem_bytes()) +
                 " bytes a block of " + std::to_string(config.threads()) + " threads\n";
}

void check_row_stride(Slot slot, const Tensor& tensor) {
  if (!tensor) return;
  const std::int64_t stride = tensor.strides[static_cast<std::size_t>(tensor.rank - 3)];
  if (stride < kMostRowStride) return;
  throw Error(ErrorCode::unsupported, std::string(to_string(slot)),
              "a stride of " + std::to_string(stride) + " elements between rows",
              "less than " + std::to_string(kMostRowStride) + " on cuda");
}

void run(const detail::PlanState& state, const Bindings& bindings, const detail::Resources& resources) {
  const Problem& problem = state.problem;
  for (const Slot slot : {Slot::q, Slot::o, Slot::k, Slot::v, Slot::k2, Slot::v2})
    check_row_stride(slot, bindings[slot]);
  const FwdConfig config = config_of(problem, state.target);
  const auto group = static_cast<int>(problem.group());
  FwdParams params = fwd_params(problem, bindings, group);
  const std::int64_t rows = problem.seqlen_q * group;
  if (rows == 0 || problem.batch == 0) return;
  const Dim3 grid{static_cast<std::uint32_t>((rows + config.tile_m - 1) / config.tile_m),
                  static_cast<std::uint32_t>(problem.heads_kv), static_cast<std::uint32_t>(problem.batch)};
  void* parameters[] = {&params};
  resources.kernels.front()->launch(grid, {static_cast<std::uint32_t>(config.threads())},
                                    static_cast<std::size_t>(config.smem_bytes()), resources.stream.handle, parameters);
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera::detail {

const Implementation kCudaFwdMma = {"cuda.fwd_mma", cuda::supports, cuda::plan, cuda::run};

}  // namespace tessera::detail
