// SPDX-License-Identifier: Apache-2.0
// The row cuda.nsa_select of the table: which blocks of tokens the queries of a tile attend to.
#include "shared/nsa_select.h"
#include "cuda/driver/occupancy.h"
#include "cuda/implementations.h"
#include "cuda/jit/element.h"
#include "cuda/jit/kernel.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"
#include "cuda/sparse/compression_params.h"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMostBlock = std::int64_t{1} << 24;  // tokens of a block: 64 blocks then end within 32 bits
constexpr std::int64_t kMostTop = 512;                      // 16 entries of a list for each lane of a warp
constexpr std::int64_t kMostMmaDim = 256;

/// Query heads of a list.
std::int64_t shared_heads(const Problem& p) { return p.nsa.query_heads ? 1 : p.group(); }

/// How a thread block divides its tiles.
struct Cut {
  SelectConfig config;
  int tile_rows;       // scoring rows of a tile
  int panel_rows;      // scoring rows whose vectors are multiplied by the keys at a time
  int tiles_together;  // of a thread block
  int shared_bytes;    // for tiles_together as it was before spread()
};

bool has_tensor_cores(const Problem& p) {
  return p.q_type == p.k_type && p.q_type != DType::fp32 && p.head_dim_qk % 8 == 0 && p.head_dim_qk <= kMostMmaDim;
}

/// The number of 16-bit terms of an element of a scoring vector. If the vector is not a row of q, there are as many as
/// (nearly) the 24 bits of fp32 need.
int terms_of(const Problem& p) {
  const bool is_row = p.nsa.reduce != TileReduce::mean && (p.nsa.score == SelectScore::softmax || shared_heads(p) == 1);
  if (is_row) return 1;
  return p.q_type == DType::bf16 ? 3 : 2;
}

/// The number of vectors of a scoring row.
std::int64_t vectors_apart(const Problem& p) { return p.nsa.score == SelectScore::dot ? 1 : shared_heads(p); }

Cut cut_of(const Problem& p, SelectConfig config) {
  const std::int64_t apart = vectors_apart(p);
  Cut cut{};
  cut.config = config;
  cut.tile_rows = p.nsa.reduce == TileReduce::max
                      ? static_cast<int>(std::min(p.nsa.tile, std::max<std::int64_t>(p.seqlen_q, 1)))
                      : 1;
  cut.panel_rows = static_cast<int>(std::max<std::int64_t>(config.rows / apart, 1));
  cut.tiles_together = std::max(cut.panel_rows / cut.tile_rows, 1);
  const std::int64_t vectors = cut.tiles_together * cut.tile_rows * apart;
  constexpr std::int64_t most = std::int64_t{1} << 24;  // more than any shared memory
  cut.shared_bytes = vectors > most ? static_cast<int>(most)
                                    : config.smem_bytes(static_cast<int>(p.head_dim_qk), static_cast<int>(vectors),
                                                        cut.tiles_together * cut.tile_rows, cut.tiles_together,
                                                        static_cast<int>(p.nsa.top + p.nsa.compressed_top));
  return cut;
}

SelectConfig base_config(const Problem& p) {
  SelectConfig config;
  config.q = element_of(p.q_type);
  config.k = element_of(p.k_type);
  config.score = p.nsa.score == SelectScore::dot ? BlockScore::dot : BlockScore::softmax;
  config.scoring = p.nsa.reduce == TileReduce::first  ? ScoringRows::first
                   : p.nsa.reduce == TileReduce::mean ? ScoringRows::mean
                                                      : ScoringRows::all;
  config.width = p.head_dim_qk % 8 == 0 ? 8 : 1;
  while (config.slots * 32 < p.nsa.top) config.slots *= 2;
  if (p.nsa.compressed_top > 0) config.compressed_slots = 1;
  while (config.compressed_slots * 32 < p.nsa.compressed_top) config.compressed_slots *= 2;
  return config;
}

/// Thread blocks per multiprocessor. With two, a thread has 128 registers, which is too few for some kernels.
int blocks_of(const Cut& cut, const Target& target) {
  const SelectConfig& c = cut.config;
  const bool is_light = c.scoring == ScoringRows::first || (c.scoring == ScoringRows::mean && !c.has_stats());
  return is_light ? std::clamp(blocks_that_fit(cut.shared_bytes, target), 1, 2) : 1;
}

/// Takes the most rows that fit, with tensor cores if these are possible. There are two stages if they fit and do not
/// reduce the number of blocks per multiprocessor.
Cut choose(const Problem& p, const Target& target) {
  Cut cut{};
  const auto fits = [&](SelectConfig config) {
    cut = cut_of(p, config);
    return cut.shared_bytes <= target.shared_memory && config.rows >= vectors_apart(p);
  };
  SelectConfig config = base_config(p);
  config.d = static_cast<int>(round_up<std::int64_t>(p.head_dim_qk, 32));
  config.terms = terms_of(p);
  for (const int rows : {64, 32}) {
    if (!has_tensor_cores(p)) break;
    config.rows = rows;
    config.stages = 1;
    const bool fits_one = fits(config);
    const Cut one = cut;
    config.stages = 2;
    if (fits(config) && blocks_of(cut, target) >= blocks_of(one, target)) return cut;
    if (fits_one) return one;
  }
  config.d = 0;
  config.terms = config.stages = 1;
  for (const int rows : {64, 32, 16}) {
    config.rows = rows;
    if (fits(config)) break;
  }
  return cut;
}

Support supports(const Problem& p, const Target& target, const Wishes& /*wishes*/) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  for (const DType dtype : {p.q_type, p.k_type}) {
    if (!is_float(dtype)) return Support::no("has no " + std::string(to_string(dtype)) + "; want fp32, fp16 or bf16");
  }
  if (const Support tokens = supports_tokens(p); !tokens) return tokens;
  const Nsa& nsa = p.nsa;
  if (std::max({p.seqlen_q, p.total_q, nsa.tile}) > kMostTokens / 2) return Support::no("counts rows in 32 bits");
  if (std::max(nsa.length, nsa.block) > kMostBlock) return Support::no("takes blocks up to 16777216 tokens");
  if (std::max(nsa.top, nsa.compressed_top) > kMostTop) return Support::no("takes top and compressed_top up to 512");
  if (nsa.compressed_block > kMostBlock) return Support::no("takes blocks up to 16777216 compressed keys");
  if (nsa.compressed_top > 0 && nsa.reduce == TileReduce::max && nsa.score == SelectScore::softmax) {
    return Support::no("has no lists of compressed keys by the largest probability of all rows of a tile");
  }
  if (nsa.local > kMostTokens) return Support::no("counts blocks in 32 bits");
  if (nsa.score == SelectScore::softmax && shared_heads(p) > 64) {
    return Support::no("adds probabilities of at most 64 heads");
  }
  const Cut cut = choose(p, target);
  if (cut.shared_bytes > target.shared_memory) {
    return Support::no("needs " + std::to_string(cut.shared_bytes) + " bytes of shared memory; the target has " +
                       std::to_string(target.shared_memory));
  }
  if (cut.config.rows < vectors_apart(p)) {
    return Support::no("has shared memory for scores of " + std::to_string(cut.config.rows) +
                       " rows; want one for each of " + std::to_string(vectors_apart(p)) + " heads of a list");
  }
  return Support::yes();
}

/// Gives each thread block fewer tiles if multiprocessors would idle. This helps as long as a block has more tiles than
/// warps, because a warp makes the lists of its tiles one after another.
void spread(Cut& cut, const Problem& p, const Target& target) {
  const std::int64_t lists = p.batch * detail::select_heads(p), tiles = detail::select_tiles(p);
  const auto idles = [&] {
    return divide_up<std::int64_t>(tiles, cut.tiles_together) * lists < 2 * std::int64_t{target.multiprocessors};
  };
  while (cut.tiles_together > SelectConfig::kWarps && idles()) cut.tiles_together = divide_up(cut.tiles_together, 2);
}

void plan(detail::PlanState& state) {
  Cut cut = choose(state.problem, state.target);
  spread(cut, state.problem, state.target);
  const SelectConfig& c = cut.config;
  const int blocks = blocks_of(cut, state.target);
  KernelSource source;
  source.name = "nsa_select" + words_of(c, Words::all);
  source.text = to_string({.file = "cuda/sparse/nsa_select.cuh",
                           .definitions = configuration_line(c),
                           .bounds = "config.threads(), " + std::to_string(blocks),
                           .parameters = {"SelectParams params"},
                           .call = "NsaSelect<config>::run(params, memory)",
                           .has_memory = true});
  source.shared_bytes = static_cast<std::size_t>(cut.shared_bytes);
  state.kernels = {source};
  state.choice = "kernel: " + source.name + "\n" + "a block of threads selects for " +
                 std::to_string(cut.tiles_together) + " tiles, " + std::to_string(cut.panel_rows) +
                 " scoring rows at a time, by " + (c.mma() ? "tensor cores" : "fused multiply-adds") + "\n";
  state.prepared = cut;
}

/// The most selection blocks that have at most 64 compressed keys together, but at least one.
int blocks_together(const Nsa& nsa) {
  constexpr std::int64_t keys = SelectConfig::kKeys;
  if (nsa.score == SelectScore::dot) return static_cast<int>(keys);
  const std::int64_t room = keys - (nsa.length / nsa.stride - 1);
  return static_cast<int>(std::max<std::int64_t>(room / (nsa.block / nsa.stride), 1));
}

SelectedLists lists_of(const Tensor& counts, const Tensor& indices, std::int64_t top) {
  SelectedLists list{};
  list.counts = counts.as<int>();
  list.indices = indices.as<int>();
  for (std::size_t i = 0; i < 3; ++i) {
    list.count_strides[i] = counts.strides[i];
    list.index_strides[i] = indices.strides[i];
  }
  list.top = static_cast<int>(top);
  return list;
}

SelectParams params_of(const Problem& problem, const Bindings& bindings, const Cut& cut) {
  const Nsa& nsa = problem.nsa;
  SelectParams p{};
  p.compression = compression_params(problem, bindings);
  p.q = head_rows(bindings[Slot::q]);
  p.keys = head_rows(bindings[Slot::k_pooled]);
  if (const Tensor& ends = bindings[Slot::cu_seqlens_q]) p.cu_seqlens_q = ends.as<int>();
  if (const Tensor& offsets = bindings[Slot::q_offset]) p.q_offset = offsets.as<i64>();
  p.seqlen_q = static_cast<int>(problem.seqlen_q);
  p.total_q = static_cast<int>(problem.total_q);
  p.selected = lists_of(bindings[Slot::selected_counts], bindings[Slot::selected_indices], nsa.top);
  p.compressed_block = Divisor(static_cast<int>(std::min(nsa.compressed_block, kMostBlock)));
  if (nsa.compressed_top > 0) {
    p.compressed = lists_of(bindings[Slot::compressed_counts], bindings[Slot::compressed_indices], nsa.compressed_top);
  }
  p.d = static_cast<int>(problem.head_dim_qk);
  p.scale = problem.softmax_scale();
  p.shared_heads = Divisor(static_cast<int>(shared_heads(problem)));
  p.lists_a_kv = Divisor(static_cast<int>(nsa.query_heads ? problem.group() : 1));
  p.tile = Divisor(static_cast<int>(nsa.tile));
  p.tiles = static_cast<int>(detail::select_tiles(problem));
  p.tiles_together = cut.tiles_together;
  p.tile_rows = Divisor(cut.tile_rows);
  p.panel_rows = cut.panel_rows;
  p.panels = divide_up(cut.tiles_together * cut.tile_rows, cut.panel_rows);
  p.initial = static_cast<int>(nsa.initial);
  p.local = static_cast<int>(nsa.local);
  p.causal = nsa.causal;
  p.needed = nsa.visible == BlockVisible::complete ? static_cast<int>(nsa.length) : 1;
  p.block = Divisor(static_cast<int>(nsa.block));
  p.blocks_together = blocks_together(nsa);
  return p;
}

void run(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  const Problem& problem = state.problem;
  const Cut& cut = *std::any_cast<Cut>(&state.prepared);
  const std::int64_t tiles = detail::select_tiles(problem);
  if (problem.batch == 0 || tiles == 0) return;
  SelectParams params = params_of(problem, bindings, cut);
  void* parameters[] = {&params};
  const Dim3 grid{static_cast<std::uint32_t>(divide_up<std::int64_t>(tiles, cut.tiles_together)),
                  static_cast<std::uint32_t>(detail::select_heads(problem)), static_cast<std::uint32_t>(problem.batch)};
  resources.kernels.front()->launch(grid, {static_cast<std::uint32_t>(SelectConfig::threads())},
                                    static_cast<std::size_t>(cut.shared_bytes), resources.stream.handle, parameters,
                                    Begins::early);
}

}  // namespace

const Implementation kNsaSelect = {{"cuda.nsa_select", DeviceType::cuda, Operation::nsa_select, supports, plan}, run};

}  // namespace tessera::cuda
