// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sparse/tile_mass.h"

#include <algorithm>
#include <limits>

#include "cuda/attention/config_words.h"
#include "cuda/attention/params.h"
#include "cuda/attention/scores/callable_source.h"
#include "cuda/attention/tiles/list_params.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "shared/mass.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostBlock = std::numeric_limits<int>::max() / 2;

// The configuration of the kernel that computes the scores once more. Its tiles are no larger than the problem's
// blocks, as far as copies allow.
FwdConfig mass_config(const FwdConfig& forward, const Problem& problem) {
  FwdConfig config = forward;
  config.tile_q = std::min(problem.block_q, problem.seqlen_q) > 32 ? 64 : 32;
  config.warps = config.tile_q / 16;
  config.tile_kv = problem.block_kv > 32 && config.d <= 256 ? 64 : 32;  // 99 KB hold 64 queries and 32 keys of 512
  config.stages = 1;
  config.loader = Loader::cp_async;
  config.q_kept = 0;
  config.tiles = Tiles::range;
  config.granule = FwdConfig{}.granule;
  config.list_elements = false;
  config.list_waives = false;
  config.trusts = config.trusts && config.source != Source::strided;  // this kernel reads lists without it
  config.dropout = false;
  config.rounded_sums = false;
  config.residual = false;
  config.output = config.type;
  config.dv = 32;
  config.dv_parts = 1;
  return config;
}

std::int64_t block_q(const Problem& problem) { return std::min(problem.block_q, kMostBlock); }

std::int64_t row_tiles(const FwdConfig& config, const Problem& problem) {
  return divide_up<std::int64_t>(std::min(block_q(problem), problem.seqlen_q), config.tile_q);
}

// Whether the forward has to keep, for the masses, the origin and sum of each row, or its LSE.
bool keeps_row_sums(const Problem& problem, std::int64_t splits) { return !problem.mass_prior_lse && splits == 1; }
bool keeps_lse(const Problem& problem, std::int64_t splits) {
  return !problem.mass_prior_lse && splits > 1 && !problem.lse;
}

std::int64_t kept_floats(const Problem& problem, std::int64_t splits) {
  const std::int64_t rows = problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
  const std::int64_t a_row = keeps_row_sums(problem, splits) ? 2 : keeps_lse(problem, splits) ? 1 : 0;
  return round_up<std::int64_t>(rows * problem.heads_q * a_row, 16);
}

// Strides of a tensor (batch, head, query block, …).
BlockStrides block_strides(const Tensor& tensor) {
  if (!tensor) return {};
  return {tensor.strides[0], tensor.strides[1], tensor.strides[2]};
}

MassParams mass_params(const FwdConfig& config, const Problem& problem, const Bindings& bindings) {
  MassParams m{};
  m.square = problem.mass != MassKind::mean;
  m.listed = static_cast<bool>(problem.list);
  m.row_tiles = Divisor(static_cast<int>(row_tiles(config, problem)));
  m.block_q = static_cast<int>(block_q(problem));
  m.block_kv = static_cast<int>(std::min(problem.block_kv, kMostBlock));
  m.query_blocks = static_cast<int>(problem.query_blocks());
  m.key_blocks = static_cast<int>(problem.key_blocks());
  m.second_block = static_cast<int>(problem.key_blocks_first());
  m.heads = static_cast<int>(problem.heads_q);
  m.threshold = problem.next_threshold;
  if (const Tensor& mass = bindings[Slot::tile_mass]) m.mass = mass.as<float>();
  if (const Tensor& counts = bindings[Slot::next_counts]) m.next_counts = counts.as<int>();
  if (const Tensor& indices = bindings[Slot::next_indices]) m.next_indices = indices.as<int>();
  if (const Tensor& bits = bindings[Slot::next_bits]) m.next_bits = bits.as<u32>();
  m.mass_strides = block_strides(bindings[Slot::tile_mass]);
  m.counts_strides = block_strides(bindings[Slot::next_counts]);
  m.indices_strides = block_strides(bindings[Slot::next_indices]);
  m.bits_strides = block_strides(bindings[Slot::next_bits]);
  return m;
}

std::int64_t sums(const Problem& problem) {
  const std::int64_t tiles = row_tiles(mass_config({}, problem), problem);
  return problem.batch * problem.heads_q * problem.query_blocks() * tiles * problem.key_blocks();
}

int shared_bytes(const FwdConfig& config) {
  return FwdConfig::kWorkBytes + config.q_bytes() + config.k_bytes() + config.descale_bytes();
}

}  // namespace

bool gathers_mass(const Problem& problem) {
  return problem.next != TileList::Form::none || problem.mass != MassKind::none;
}

Support supports_mass(const Problem& problem) {
  constexpr std::int64_t most_grid = 65535;
  if (problem.heads_q > most_grid) return Support::no("weighs tiles of at most 65535 heads");
  const std::int64_t tiles = row_tiles(mass_config({}, problem), problem);
  if (std::max(problem.query_blocks() * tiles, problem.key_blocks()) > kMostBlock) {
    return Support::no("counts tiles of a sequence in 32 bits");
  }
  return Support::yes();
}

std::size_t mass_bytes(const Problem& problem, std::int64_t splits) {
  return static_cast<std::size_t>(kept_floats(problem, splits) + sums(problem)) * sizeof(float);
}

std::vector<KernelSource> mass_sources(const FwdConfig& config, const Problem& problem) {
  const FwdConfig c = mass_config(config, problem);
  const CallableSources callables = callable_sources(problem);
  KernelSource weigh;
  weigh.name = "tile_mass" + words_of(c) + callables.words();
  weigh.shared_bytes = static_cast<std::size_t>(shared_bytes(c));
  weigh.user_texts = callables.files();
  std::vector<std::string> parameters = {"FwdParams params", "MassParams mass"};
  if (c.has_descales()) parameters.emplace_back("DescaleParams descales");
  weigh.text = to_string({.file = "cuda/attention/sparse/tile_mass.cuh",
                          .definitions = configuration_line(c) + callables.definitions(),
                          .bounds = "config.threads(), 3",
                          .parameters = parameters,
                          .call = "TileMass<config, " + callables.type() + ">::run(params, mass, memory" +
                                  (c.has_descales() ? ", descales)" : ")"),
                          .has_memory = true});
  KernelSource finish;
  finish.name = "finish_mass";
  finish.text = to_string({.file = "cuda/attention/sparse/finish_mass.cuh",
                           .bounds = "32",
                           .parameters = {"FwdParams params", "MassParams mass"},
                           .call = "finish_mass(params, mass)"});
  return {weigh, finish};
}

void keep_rows(FwdParams& params, const Problem& problem, std::int64_t splits, std::byte* workspace) {
  static_assert(sizeof(RowSum) == 2 * sizeof(float));
  const bool varlen = problem.q_layout == Layout::varlen;
  const std::int64_t rows = varlen ? problem.total_q : problem.seqlen_q;
  const Strides strides = {varlen ? 0 : problem.heads_q * rows, 1, rows};
  if (keeps_row_sums(problem, splits)) {
    params.row_sums = reinterpret_cast<RowSum*>(workspace);
    params.row_sum_strides = strides;
  } else if (keeps_lse(problem, splits)) {
    params.lse = reinterpret_cast<float*>(workspace);
    params.lse_strides = strides;
  }
}

void launch_mass(const FwdConfig& config, FwdParams params, DescaleParams descales, const Problem& problem,
                 const Bindings& bindings, std::int64_t splits, std::byte* workspace,
                 std::span<const Kernel* const> kernels, Stream stream) {
  if (problem.query_blocks() == 0) return;
  const FwdConfig c = mass_config(config, problem);
  MassParams mass = mass_params(c, problem, bindings);
  mass.sums = reinterpret_cast<float*>(workspace) + kept_floats(problem, splits);
  params.group = Divisor(1);
  params.splits = Divisor(1);
  if (problem.mass_prior_lse) {
    params.lse = bindings[Slot::prior_lse].as<float>();
    params.lse_strides = lse_strides(bindings[Slot::prior_lse]);
  }
  void* parameters[] = {&params, &mass, &descales};
  const auto heads = static_cast<std::uint32_t>(problem.heads_q);
  const auto batch = static_cast<std::uint32_t>(problem.batch);
  const auto blocks = static_cast<std::uint32_t>(problem.query_blocks());
  kernels[0]->launch({blocks * mass.row_tiles.value, heads, batch}, {static_cast<std::uint32_t>(c.threads())},
                     static_cast<std::size_t>(shared_bytes(c)), stream.handle, parameters);
  kernels[1]->launch({blocks, heads, batch}, {32}, 0, stream.handle, parameters);
}

}  // namespace tessera::cuda
