// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/masks/mask_tiles.h"

#include <algorithm>

#include "cuda/attention/scores/callable_source.h"
#include "cuda/attention/sparse/tile_mass.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"

namespace tessera::cuda {
namespace {

// With fewer queries the mask has too few elements for a kernel of its own to pay.
constexpr std::int64_t kLeastQueries = kMaskBlock;
constexpr std::int64_t kMostBlocks = 65535;  // in y and z of a grid
// Of the whole grid: capacities of packed sequences may be far above their lengths.
constexpr double kMostOfGrid = 1 << 21;

std::int64_t blocks_of(std::int64_t length) { return divide_up<std::int64_t>(length, kMaskBlock); }
std::int64_t second_block_of(const Problem& problem) { return blocks_of(problem.kv.seqlen); }
std::int64_t key_blocks_of(const Problem& problem) {
  return second_block_of(problem) + (problem.kv2 ? blocks_of(problem.kv2->seqlen) : 0);
}

// The mask bits, one for each query and key, may take as many bytes as q and o have in 16 bits, or 1 MB.
double bit_bytes(const Problem& problem) {
  const auto rows = static_cast<double>(problem.batch * blocks_of(problem.seqlen_q) * kMaskBlock);
  return rows * static_cast<double>(key_blocks_of(problem)) * (kMaskBlock / 8);
}
bool has_room(const Problem& problem) {
  const std::int64_t rows = problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
  const std::int64_t columns = problem.head_dim_qk + problem.head_dim_v;
  const std::int64_t most = std::max<std::int64_t>(2 * rows * problem.heads_q * columns, std::int64_t{1} << 20);
  return bit_bytes(problem) <= static_cast<double>(most);
}

// Whether a kernel before attention evaluates the mask. With one head that would save nothing.
bool is_evaluated_once(const Problem& problem) {
  if (problem.batch_invariant) return false;  // whether there is room depends on the batch
  const std::int64_t words = divide_up<std::int64_t>(key_blocks_of(problem), 32);
  const double blocks = static_cast<double>(problem.seqlen_q) / MaskTilesConfig::kRows * static_cast<double>(words);
  if (blocks * static_cast<double>(problem.batch) > kMostOfGrid) return false;
  return has_shared_mask(problem) && problem.heads_q > 1 && problem.seqlen_q >= kLeastQueries && problem.batch > 0 &&
         problem.batch <= kMostBlocks && words > 0 && words <= kMostBlocks && !problem.skip && !gathers_mass(problem);
}

// Whether a backward has a better plan without a list: then several blocks may share the rows of few keys, and one pass
// may compute all gradients.
bool keeps_better_plan(const Problem& problem) {
  if (problem.pass == Pass::forward) return false;
  const std::int64_t keys = problem.kv.seqlen + (problem.kv2 ? problem.kv2->seqlen : 0);
  return problem.deterministic || problem.dropout > 0.0F || problem.seqlen_q > 8 * keys;
}

}  // namespace

bool has_mask_bits(const Problem& problem) {
  const TileList& list = problem.list;
  return list && list.heads == TileList::Heads::one && problem.block_q % kMaskBlock == 0 &&
         problem.block_kv % kMaskBlock == 0 && is_evaluated_once(problem) && has_room(problem);
}

Problem with_mask_list(const Problem& problem, const Wishes& wishes) {
  Problem listed = problem;
  if (problem.list || problem.bwd_list || wishes.tile_q || wishes.tile_kv || wishes.warps || !wishes.loader.empty())
    return listed;
  if (wishes.splits || wishes.stages || !is_evaluated_once(problem) || keeps_better_plan(problem)) return listed;
  listed.list = {.form = TileList::Form::bitmask, .heads = TileList::Heads::one, .per_batch = true, .full = true};
  listed.block_q = listed.block_kv = kMaskBlock;
  return listed;
}

MaskTiles::MaskTiles(const Problem& problem, const Problem& given, MaskBitsOf bits)
    : config_{.classifies = problem.list && !given.list,
              .keeps_bits = bits != MaskBitsOf::nothing,
              .keys_down = bits == MaskBitsOf::keys,
              .segments = problem.kv2 ? 2 : 1,
              .compressed_causal = problem.compressed_causal.has_value(),
              .chunked = problem.chunk > 0},
      batch_(problem.batch),
      queries_(problem.seqlen_q),
      key_blocks_(key_blocks_of(problem)),
      second_block_(second_block_of(problem)) {}

std::int64_t MaskTiles::words() const noexcept { return divide_up<std::int64_t>(key_blocks_, 32); }
std::int64_t MaskTiles::list_words() const noexcept {
  return config_.classifies ? round_up<std::int64_t>(batch_ * blocks_of(queries_) * words(), 4) : 0;
}
std::int64_t MaskTiles::bit_rows() const noexcept {
  return (config_.keys_down ? key_blocks_ : blocks_of(queries_)) * kMaskBlock;
}
std::int64_t MaskTiles::row_words() const noexcept {
  return (config_.keys_down ? blocks_of(queries_) : key_blocks_) * (kMaskBlock / 32);
}

std::size_t MaskTiles::bytes() const noexcept {
  const std::int64_t bits = config_.keeps_bits ? batch_ * bit_rows() * row_words() : 0;
  return static_cast<std::size_t>(2 * list_words() + bits) * 4;
}

KernelSource MaskTiles::source(const Problem& problem) const {
  const CallableSources all = callable_sources(problem);
  CallableSources callables;
  callables.mask = all.mask;
  KernelSource source;
  source.name = "mark_mask" + words_of(config_, Words::beyond_defaults) + callables.words();
  source.user_texts = callables.files();
  source.text = to_string({.file = "cuda/attention/masks/mark_mask.cuh",
                           .definitions = configuration_line(config_) + callables.definitions(),
                           .bounds = "config.threads()",
                           .parameters = {"AttentionParams params", "MaskTilesParams tiles"},
                           .call = "MarkMask<config, " + callables.type() + ">::run(params, tiles)"});
  return source;
}

MaskTilesParams MaskTiles::params(std::byte* memory) const noexcept {
  u32* words_at = reinterpret_cast<u32*>(memory);
  return {.visible = words_at,
          .full = words_at + list_words(),
          .words = static_cast<int>(words()),
          .list_words = list_words(),
          .resets = false,
          .key_blocks = static_cast<int>(key_blocks_),
          .bits = {words_at + 2 * list_words(), bit_rows() * row_words(), static_cast<int>(row_words()),
                   static_cast<int>(second_block_)}};
}

void MaskTiles::complete(ListParams& list, std::byte* memory) const {
  const MaskTilesParams tiles = params(memory);
  list.mask_bits = tiles.bits;
  if (!config_.classifies) return;
  const i64 of_batch = blocks_of(queries_) * words();
  list.form = ListForm::bitmask;
  list.heads = ListHeads::kv;
  list.has_full = true;
  list.partial = {nullptr, tiles.visible, {}, {of_batch, 0, words()}, 0};
  list.full = {nullptr, tiles.full, {}, {of_batch, 0, words()}, 0};
  list.block_q = list.block_kv = Divisor(kMaskBlock);
  list.key_blocks = tiles.key_blocks;
  list.second_block = tiles.bits.second_block;
  list.second_blocks = tiles.key_blocks - tiles.bits.second_block;
  list.words = tiles.words;
}

void MaskTiles::launch(const Kernel& kernel, const AttentionParams& p, std::byte* memory, Stream stream) const {
  MaskTilesParams tiles = params(memory);
  AttentionParams attention = p;
  void* parameters[] = {&attention, &tiles};
  const auto start = [&](Dim3 grid) {
    kernel.launch(grid, {static_cast<std::uint32_t>(MaskTilesConfig::threads())}, 0, stream.handle, parameters,
                  Begins::early);
  };
  const auto count = [](std::int64_t n) { return static_cast<std::uint32_t>(n); };
  if (config_.classifies) {
    tiles.resets = true;
    start({count(divide_up<std::int64_t>(tiles.list_words, MaskTilesConfig::threads()))});
    tiles.resets = false;
  }
  const std::int64_t rows = config_.keys_down ? bit_rows() : queries_;
  const std::int64_t across = config_.keys_down ? divide_up<std::int64_t>(blocks_of(queries_), 32) : words();
  start({count(divide_up<std::int64_t>(rows, MaskTilesConfig::kRows)), count(across), count(batch_)});
}

}  // namespace tessera::cuda
