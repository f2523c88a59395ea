// SPDX-License-Identifier: Apache-2.0
// Where the oracle finds rows: lengths, tokens, pages, positions and lists of tiles, resolved from the bindings.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::reference {

/// One sequence's rows in one tensor of tokens.
struct Rows {
  std::int64_t length = 0;       // rows that are used
  std::int64_t capacity = 0;     // rows of the tensor that belong to the sequence; those past length are padding
  std::int64_t first_token = 0;  // dense: b · seqlen; varlen: cu_seqlens[b]; paged: 0
  std::int64_t position = 0;     // of row 0
};

/// Slots of a KV segment.
struct SegmentSlots {
  Slot k, v, dk, dv, cu_seqlens, seqused, table, indptr, indices, last_page_len, offset;
};
const SegmentSlots& segment_slots(std::size_t segment) noexcept;

struct Sequences {
  std::vector<Rows> query;               // (batch)
  std::vector<std::vector<Rows>> keys;   // (segments, batch)
  std::int64_t query_tokens = 0;         // rows of q: b · seqlen_q or total_q
  std::vector<std::int64_t> key_tokens;  // rows of k by segment: b · seqlen, total or pages · page_size
};
Sequences resolve_sequences(const Problem& problem, const Bindings& bindings);

/// Token of key `index`: row of the tensor seen as (tokens, heads, dim); for paged KV page · page_size + slot.
std::int64_t key_token(const Problem& problem, const Bindings& bindings, std::size_t segment, std::int64_t batch,
                       const Rows& rows, std::int64_t index);

/// Element offset of head `head` of token `token` in a (batch, seqlen, heads, dim), (pages, page_size, heads, dim) or
/// (tokens, heads, dim) tensor.
std::int64_t token_offset(const Tensor& tensor, std::int64_t token, std::int64_t head);
/// The first `dim` elements of that row.
std::vector<double> load_row(const Tensor& tensor, std::int64_t token, std::int64_t head, std::int64_t dim);

/// Row-major index, in an LSE-shaped output, of a query row; and its element offset in an LSE-shaped tensor.
std::int64_t lse_index(const Problem& problem, std::int64_t batch, std::int64_t head, const Rows& rows,
                       std::int64_t row);
std::int64_t lse_offset(const Tensor& tensor, std::int64_t batch, std::int64_t head, const Rows& rows,
                        std::int64_t row);

enum class TileState : std::uint8_t { skipped, partial, full };

/// A list of tiles in any form as one state for each tile.
class TileStates {
 public:
  /// `backward_slots`: read the bwd_* slots. A list of form none makes every tile partial.
  TileStates(const Problem& problem, const TileList& list, const Bindings& bindings, bool backward_slots);
  [[nodiscard]] TileState at(std::int64_t batch, std::int64_t head_q, std::int64_t query_block,
                             std::int64_t key_block) const noexcept;

 private:
  void mark(const Tensor& counts, const Tensor& indices, TileState state);
  void mark_bits(const Tensor& bits, TileState state);
  void mark_blocks(const Tensor& bits, TileState state);

  TileList list_;
  std::int64_t batches_, heads_, group_, query_blocks_, key_blocks_;
  std::vector<TileState> states_;  // (batches, heads, query blocks, key blocks)
};

}  // namespace tessera::reference
