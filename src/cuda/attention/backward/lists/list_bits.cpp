// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/lists/list_bits.h"

#include "bindings/slot_rules.h"
#include "cuda/attention/tiles/list_params.h"

namespace tessera::cuda {
namespace {

struct BitRows {
  std::int64_t own;    // tiles that blocks own
  std::int64_t words;  // of each, for the tiles of the list
  std::int64_t first_tiles;
  std::int64_t waived_words;  // of each, for its full tiles
  std::int64_t counts;        // of each, for the number of its tiles

  std::int64_t all_words() const { return words + waived_words + counts; }
};

BitRows bit_rows(const Problem& problem, const BwdConfig& config) {
  const auto key_tiles = [&config](const KvSource& source) {
    return divide_up<std::int64_t>(source.seqlen, config.tile_kv);
  };
  const std::int64_t rows = divide_up<std::int64_t>(problem.seqlen_q, config.tile_queries());
  const std::int64_t first = key_tiles(problem.kv);
  const std::int64_t keys = first + (problem.kv2 ? key_tiles(*problem.kv2) : 0);
  const bool queries = config.keeps_queries();
  const std::int64_t words = divide_up<std::int64_t>(queries ? keys : rows, 32);
  return {queries ? rows : keys, words, first, config.list_waives ? words : 0, config.has_parts() ? 1 : 0};
}

}  // namespace

const TileList& backward_list(const Problem& problem) { return problem.bwd_list ? problem.bwd_list : problem.list; }

std::int64_t list_batches(const Problem& problem) { return backward_list(problem).per_batch ? problem.batch : 1; }

std::int64_t list_rows(const Problem& problem) {
  return backward_list(problem).form == TileList::Form::transposed ? problem.key_blocks() : problem.query_blocks();
}

std::int64_t bit_count(const Problem& problem, const BwdConfig& config) {
  if (!config.has_list()) return 0;
  const BitRows rows = bit_rows(problem, config);
  return list_batches(problem) * problem.list_heads(backward_list(problem)) * rows.own * rows.all_words();
}

TileBits tile_bits(const Problem& problem, const BwdConfig& config, u32* words) {
  const TileList& list = backward_list(problem);
  const BitRows rows = bit_rows(problem, config);
  const i64 of_head = rows.own * rows.all_words();
  return {.words = words,
          .batch_stride = list.per_batch ? problem.list_heads(backward_list(problem)) * of_head : 0,
          .head_stride = list.heads == TileList::Heads::one ? 0 : of_head,
          .row_words = static_cast<int>(rows.all_words()),
          .waived_words = static_cast<int>(rows.waived_words > 0 ? rows.words : 0),
          .tile_q = config.tile_queries(),
          .tile_kv = config.tile_kv,
          .first_tiles = static_cast<int>(rows.first_tiles),
          .keys_own = !config.keeps_queries(),
          .counts = config.has_parts()};
}

ListParams bwd_list_params(const Problem& problem, const Bindings& bindings) {
  return list_params(problem, backward_list(problem), detail::list_slots(bool{problem.bwd_list}), bindings);
}

}  // namespace tessera::cuda
