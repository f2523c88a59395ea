// SPDX-License-Identifier: Apache-2.0
// The row cuda.nsa_pool of the table: compressed keys and values, and their gradients.
//
// These are the launches, in their order:
//
//     forward                      means
//     forward with projections     means in fp32, their products with the matrices
//     backward                     gradients of tokens
//     backward with projections    products of gradients with the transposed matrices in fp32, gradients of tokens,
//                                  means in fp32, gradients of the matrices
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "cuda/sparse/compression_params.h"

namespace tessera::cuda {
namespace {

/// Sides (K and V) of the same type share launches.
struct Part {
  int first, count;
};

std::vector<Part> parts_of(const Problem& p) {
  if (p.k_type == p.v_type) return {{0, 2}};
  return {{0, 1}, {1, 1}};
}

int width_of(const Problem& p) { return p.head_dim_qk % 8 == 0 && p.head_dim_v % 8 == 0 ? 8 : 1; }

std::int64_t widest(const Problem& p) { return std::max(p.head_dim_qk, p.head_dim_v); }

/// Elements of all rows of one side.
std::int64_t pooled_numbers(const Problem& p, std::int64_t dim) { return pooled_capacity(p) * p.heads_kv * dim; }

Support supports(const Problem& p, const Target& target, const Wishes& /*wishes*/) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  for (const DType dtype : {p.k_type, p.v_type}) {
    if (!is_float(dtype)) return Support::no("has no " + std::string(to_string(dtype)) + "; want fp32, fp16 or bf16");
  }
  if (const Support tokens = supports_tokens(p); !tokens) return tokens;
  if (p.heads_kv * widest(p) > kMostGrid * 32) return Support::no("wants at most 2097120 columns of all heads");
  if (p.nsa.project && ProjectConfig::smem_bytes(static_cast<int>(widest(p))) > target.shared_memory) {
    return Support::no("keeps 16 rows of fp32 in shared memory; the target has " +
                       std::to_string(target.shared_memory) + " bytes");
  }
  return Support::yes();
}

template <class Config>
KernelSource source_of(const Config& c, const char* family, const char* call, const char* params, int shared_bytes) {
  const bool has_memory = shared_bytes > 0;
  KernelSource source;
  source.name = family + words_of(c, Words::all);
  source.text = to_string({.file = std::string("cuda/sparse/") + family + ".cuh",
                           .definitions = configuration_line(c),
                           .bounds = "config.threads()",
                           .parameters = {std::string(params) + " params"},
                           .call = std::string(call) + "<config>::run(params" + (has_memory ? ", memory)" : ")"),
                           .has_memory = has_memory});
  source.shared_bytes = static_cast<std::size_t>(shared_bytes);
  return source;
}

KernelSource pool_source(const PoolConfig& c) { return source_of(c, "nsa_pool", "NsaPool", "PoolParams", 0); }
KernelSource spread_source(const SpreadConfig& c) { return source_of(c, "nsa_spread", "NsaSpread", "PoolParams", 0); }
KernelSource project_source(const ProjectConfig& c, std::int64_t dim) {
  return source_of(c, "nsa_project", "NsaProject", "ProjectParams", ProjectConfig::smem_bytes(static_cast<int>(dim)));
}
KernelSource gradient_source(const MatrixGradientConfig& c) {
  return source_of(c, "nsa_matrix_gradient", "NsaMatrixGradient", "MatrixGradientParams", 0);
}

/// In the order of their launches.
void add_kernels(detail::PlanState& state, Element type) {
  const Problem& p = state.problem;
  const int width = width_of(p);
  std::vector<KernelSource>& kernels = state.kernels;
  if (p.pass == Pass::forward) {
    kernels.push_back(pool_source({type, p.nsa.project ? Element::fp32 : type, width}));
    if (p.nsa.project) kernels.push_back(project_source({Element::fp32, type, type, false}, widest(p)));
    return;
  }
  if (p.nsa.project) kernels.push_back(project_source({type, type, Element::fp32, true}, widest(p)));
  kernels.push_back(spread_source({p.nsa.project ? Element::fp32 : type, type, width}));
  if (!p.nsa.project) return;
  kernels.push_back(pool_source({type, Element::fp32, width}));
  kernels.push_back(gradient_source({type}));
}

void plan(detail::PlanState& state) {
  const Problem& p = state.problem;
  const std::array<detail::PoolSide, 2> sides = detail::pool_sides(p);
  for (const Part& part : parts_of(p)) {
    add_kernels(state, element_of(sides[static_cast<std::size_t>(part.first)].dtype));
  }
  for (const KernelSource& source : state.kernels) state.choice += "kernel: " + source.name + "\n";
  if (p.nsa.project) {
    const std::int64_t numbers = pooled_numbers(p, p.head_dim_qk) + pooled_numbers(p, p.head_dim_v);
    state.workspace_bytes = static_cast<std::size_t>(numbers) * sizeof(float);
  }
}

/// Launches the kernels of one part.
class Launches {
 public:
  Launches(const Problem& problem, const Bindings& bindings, const Resources& resources, const Part& part)
      : p_(problem), bindings_(bindings), resources_(resources), part_(part), sides_(detail::pool_sides(problem)) {
    compression_ = compression_params(problem, bindings);
    batches_ = static_cast<std::uint32_t>(std::max<std::int64_t>(problem.batch, 1) * part.count);
  }

  /// Means of tokens, to the workspace or to the output.
  void pool(const Kernel& kernel, bool to_workspace) {
    PoolParams params = pool_params();
    for (int i = 0; i < part_.count; ++i) {
      params.side[i].tokens = head_rows(bindings_[side(i).tokens]);
      params.side[i].pooled = to_workspace ? workspace_rows(i) : head_rows(bindings_[side(i).pooled]);
    }
    if (const Tensor& begins = bindings_[Slot::cu_blocks]; begins && part_.first == 0) {
      params.cu_blocks = begins.as<int>();
    }
    if (most_blocks(p_) == 0 && params.cu_blocks == nullptr) return;
    launch(kernel, {blocks(1), columns(), batches_}, PoolConfig::threads(), params);
  }

  /// Gradients of tokens.
  void spread(const Kernel& kernel) {
    PoolParams params = pool_params();
    for (int i = 0; i < part_.count; ++i) {
      params.side[i].tokens = head_rows(bindings_[side(i).dtokens]);
      params.side[i].pooled = p_.nsa.project ? workspace_rows(i) : head_rows(bindings_[side(i).dpooled]);
    }
    const auto tokens = static_cast<std::uint32_t>(
        divide_up<std::int64_t>(p_.kv.seqlen, static_cast<std::int64_t>(SpreadConfig::tokens())));
    if (tokens == 0 || p_.batch == 0) return;
    launch(kernel, {tokens, columns(), batches_}, SpreadConfig::threads(), params);
  }

  /// Means times matrices, or gradients times the transposes.
  void project(const Kernel& kernel) {
    const bool forward = p_.pass == Pass::forward;
    ProjectParams params{};
    params.compression = compression_;
    params.sides = part_.count;
    for (int i = 0; i < part_.count; ++i) {
      ProjectSide& to = params.side[i];
      to.from = forward ? workspace_rows(i) : head_rows(bindings_[side(i).dpooled]);
      to.to = forward ? head_rows(bindings_[side(i).pooled]) : workspace_rows(i);
      const Tensor& matrix = bindings_[side(i).projection];
      to.matrix = reinterpret_cast<const char*>(matrix.bytes());
      to.matrix_strides[0] = matrix.strides[0];
      to.matrix_strides[1] = matrix.strides[1];
      to.dim = static_cast<int>(side(i).dim);
    }
    if (most_blocks(p_) == 0 || p_.batch == 0) return;
    const Dim3 grid{blocks(ProjectConfig::kRows), static_cast<std::uint32_t>(p_.heads_kv), batches_};
    launch(kernel, grid, ProjectConfig::threads(), params, ProjectConfig::smem_bytes(static_cast<int>(widest(p_))));
  }

  void find_matrix_gradients(const Kernel& kernel) {
    MatrixGradientParams params{};
    params.compression = compression_;
    params.blocks = Divisor(static_cast<int>(std::max<std::int64_t>(most_blocks(p_), 1)));
    if (most_blocks(p_) == 0) params.compression.batch = 0;  // the sums are 0
    for (int i = 0; i < part_.count; ++i) {
      MatrixGradientSide& to = params.side[i];
      to.means = workspace_rows(i);
      to.gradients = head_rows(bindings_[side(i).dpooled]);
      const Tensor& matrix = bindings_[side(i).dprojection];
      to.matrix = matrix.as<float>();
      to.matrix_strides[0] = matrix.strides[0];
      to.matrix_strides[1] = matrix.strides[1];
      to.dim = static_cast<int>(side(i).dim);
    }
    const auto tiles = static_cast<std::uint32_t>(divide_up<std::int64_t>(widest(p_), MatrixGradientConfig::kTile));
    const Dim3 grid{tiles * tiles, static_cast<std::uint32_t>(p_.heads_kv), static_cast<std::uint32_t>(part_.count)};
    launch(kernel, grid, MatrixGradientConfig::threads(), params);
  }

 private:
  [[nodiscard]] const detail::PoolSide& side(int i) const { return sides_[static_cast<std::size_t>(part_.first + i)]; }

  [[nodiscard]] PoolParams pool_params() const {
    PoolParams params{};
    params.compression = compression_;
    params.sides = part_.count;
    params.heads = static_cast<int>(p_.heads_kv);
    for (int i = 0; i < part_.count; ++i) params.side[i].dim = static_cast<int>(side(i).dim);
    return params;
  }

  /// The fp32 rows of side `i` in the workspace; those of K come first.
  [[nodiscard]] HeadRows workspace_rows(int i) const {
    auto* numbers = reinterpret_cast<float*>(resources_.workspace);
    if (part_.first + i > 0) numbers += pooled_numbers(p_, p_.head_dim_qk);
    const i64 row = p_.heads_kv * side(i).dim;
    return {reinterpret_cast<char*>(numbers), {packs_keys(p_) ? 0 : most_blocks(p_) * row, row, side(i).dim}};
  }

  /// The number of thread blocks for the compressed blocks of the longest sequence, `together` in each.
  [[nodiscard]] std::uint32_t blocks(int together) const {
    return static_cast<std::uint32_t>(
        divide_up<std::int64_t>(std::max<std::int64_t>(most_blocks(p_), 1), static_cast<std::int64_t>(together)));
  }
  [[nodiscard]] std::uint32_t columns() const {
    return static_cast<std::uint32_t>(divide_up<std::int64_t>(
        p_.heads_kv * divide_up<std::int64_t>(widest(p_), width_of(p_)), static_cast<std::int64_t>(32)));
  }

  template <class Params>
  void launch(const Kernel& kernel, Dim3 grid, int threads, Params& params, int shared_bytes = 0) const {
    void* parameters[] = {&params};
    kernel.launch(grid, {static_cast<std::uint32_t>(threads)}, static_cast<std::size_t>(shared_bytes),
                  resources_.stream.handle, parameters, Begins::early);
  }

  const Problem& p_;
  const Bindings& bindings_;
  const Resources& resources_;
  Part part_;
  std::array<detail::PoolSide, 2> sides_;
  CompressionParams compression_{};
  std::uint32_t batches_ = 1;
};

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& p = state.problem;
  const Kernel* const* next = resources.kernels.data();
  for (const Part& part : parts_of(p)) {
    Launches launches(p, bindings, resources, part);
    if (p.pass == Pass::forward) {
      launches.pool(**next++, p.nsa.project);
      if (p.nsa.project) launches.project(**next++);
      continue;
    }
    if (p.nsa.project) launches.project(**next++);
    launches.spread(**next++);
    if (!p.nsa.project) continue;
    launches.pool(**next++, true);
    launches.find_matrix_gradients(**next++);
  }
}

}  // namespace

const Implementation kNsaPool = {{"cuda.nsa_pool", DeviceType::cuda, Operation::nsa_pool, supports, plan}, run};

}  // namespace tessera::cuda
