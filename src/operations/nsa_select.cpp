// SPDX-License-Identifier: Apache-2.0
// nsa_select: selects the blocks of tokens to which a tile's queries attend in the selected branch of native sparse
// attention.
#include <limits>
#include <numeric>

#include "bindings/validate_parts.h"
#include "operations/nsa.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

constexpr Word<bool> kHeads[] = {{"kv", false}, {"q", true}};
constexpr Word<SelectScore> kScores[] = {{"dot", SelectScore::dot}, {"softmax", SelectScore::softmax}};
constexpr Word<TileReduce> kReductions[] = {
    {"first", TileReduce::first}, {"mean", TileReduce::mean}, {"max", TileReduce::max}};
constexpr Word<BlockVisible> kVisible[] = {{"complete", BlockVisible::complete}, {"started", BlockVisible::started}};

SourceDefaults source_defaults(const Problem& p) {
  return {p.q_layout == Layout::varlen ? KvLayout::varlen : KvLayout::dense, false};
}

void parse(const LineReader& line, Problem& p) {
  const Nsa none;
  read_sizes(line, p);
  read_source(line, p, p.kv, source_defaults(p));
  read_compression(line, p);
  p.nsa.block = line.integer("block").value_or(p.nsa.length);
  p.nsa.top = line.integer("top").value_or(none.top);
  p.nsa.tile = line.integer("tile").value_or(none.tile);
  p.nsa.query_heads = line.word("heads", kHeads).value_or(false);
  p.nsa.score = line.word("score", kScores).value_or(none.score);
  p.nsa.reduce = line.word("reduce", kReductions).value_or(none.reduce);
  p.nsa.visible = line.word("visible", kVisible).value_or(none.visible);
  p.nsa.initial = line.integer("initial").value_or(none.initial);
  p.nsa.local = line.integer("local").value_or(none.local);
  p.nsa.compressed_top = line.integer("compressed_top").value_or(none.compressed_top);
  p.nsa.compressed_block = line.integer("compressed_block").value_or(none.compressed_block);
  p.nsa.causal = line.flag("causal");
  p.scale = line.number("scale");
  read_promises(line, p);
}

void print(LineWriter& line, const Problem& p) {
  const Nsa none;
  write_sizes(line, p);
  write_source(line, p, p.kv, source_defaults(p));
  write_compression(line, p);
  line.integer("block", p.nsa.block, p.nsa.length);
  line.integer("top", p.nsa.top, none.top);
  line.integer("tile", p.nsa.tile, none.tile);
  if (p.nsa.query_heads) line.word("heads", word_of(kHeads, true));
  if (p.nsa.score != none.score) line.word("score", word_of(kScores, p.nsa.score));
  if (p.nsa.reduce != none.reduce) line.word("reduce", word_of(kReductions, p.nsa.reduce));
  if (p.nsa.visible != none.visible) line.word("visible", word_of(kVisible, p.nsa.visible));
  line.integer("initial", p.nsa.initial, none.initial);
  line.integer("local", p.nsa.local, none.local);
  line.integer("compressed_top", p.nsa.compressed_top, none.compressed_top);
  line.integer("compressed_block", p.nsa.compressed_block, none.compressed_block);
  line.flag("causal", p.nsa.causal);
  if (p.scale) line.number("scale", *p.scale);
  write_promises(line, p);
}

/// The most blocks that are taken whatever their scores. Tiles begin at multiples of `tile`.
std::int64_t most_forced(const Nsa& nsa) {
  if (nsa.local == 0) return nsa.initial;
  const std::int64_t latest = nsa.block - std::gcd(nsa.block, nsa.tile);  // first row of a tile within its block
  return nsa.initial + nsa.local + (latest + nsa.tile - 1) / nsa.block;
}

/// The same for blocks of compressed keys. With a causal mask, the last row of a tile may see ceil((tile − 1) / stride)
/// more compressed keys than the first.
std::int64_t most_forced_compressed(const Nsa& nsa) {
  if (!nsa.causal) return 1;
  return (ceil_div(nsa.tile - 1, nsa.stride) + nsa.compressed_block - 1) / nsa.compressed_block + 1;
}

void check_compressed_list(const Problem& p) {
  const Nsa none, &nsa = p.nsa;
  check_size("nsa.compressed_top", nsa.compressed_top, 0);
  check_size("nsa.compressed_block", nsa.compressed_block, 1);
  if (nsa.compressed_top == 0) {
    if (nsa.compressed_block == none.compressed_block) return;
    refuse_field("nsa.compressed_block", std::to_string(nsa.compressed_block),
                 std::to_string(none.compressed_block) + ", as no list is made of such blocks, or nsa.compressed_top");
  }
  const std::int64_t forced = most_forced_compressed(nsa);
  if (nsa.compressed_top < forced) {
    refuse_field("nsa.compressed_top", std::to_string(nsa.compressed_top),
                 "0, or " + std::to_string(forced) + " or more, as many blocks as the rows of a tile can have newest");
  }
  check_bytes("nsa.compressed_top", {p.batch, p.heads_q, select_tiles(p), nsa.compressed_top});
}

void check_score(const Nsa& nsa) {
  if (nsa.score == SelectScore::dot) {
    if (nsa.length == nsa.stride && nsa.length == nsa.block) return;
    refuse_field("nsa.score", "dot", "softmax, or length, stride and block alike: one product decides a block");
  }
  if (nsa.length % nsa.stride != 0 || nsa.block % nsa.stride != 0) {
    refuse_field("nsa.stride", std::to_string(nsa.stride),
                 "a divisor of length " + std::to_string(nsa.length) + " and of block " + std::to_string(nsa.block));
  }
}

void check(const Problem& p) {
  refuse_unused(p, {{"pass", p.pass != Pass::forward}, {"sink", p.sink}, {"lse", p.lse}, {"seqused_q", p.seqused_q}});
  refuse_nsa_fields_of_others(p, [](Nsa& nsa) {
    const bool project = nsa.project;
    const GateKind gate = nsa.gate;
    nsa = Nsa{};
    nsa.project = project;
    nsa.gate = gate;
  });
  check_compression(p);
  check_scale(p);
  if (p.heads_q % p.heads_kv != 0) {
    refuse_field("heads_kv", std::to_string(p.heads_kv) + " for " + std::to_string(p.heads_q) + " query heads",
                 "a divisor of heads_q");
  }
  check_size("nsa.block", p.nsa.block, 1);
  check_size("nsa.top", p.nsa.top, 1);
  check_size("nsa.tile", p.nsa.tile, 1);
  check_size("nsa.initial", p.nsa.initial, 0);
  check_size("nsa.local", p.nsa.local, 0);
  check_score(p.nsa);
  check_compressed_list(p);
  const std::int64_t forced = most_forced(p.nsa);
  if (p.nsa.top < forced) {
    refuse_field("nsa.top", std::to_string(p.nsa.top),
                 std::to_string(forced) + " or more, as many blocks as initial and local can force");
  }
  if (p.kv.seqlen / p.nsa.block > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::overflow, "kv.seqlen", std::to_string(p.kv.seqlen), "at most 2147483647 blocks, int32");
  }
  check_bytes("nsa.top", {p.batch, p.heads_q, select_tiles(p), p.nsa.top});
}

void tensors(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
  w.query_lengths();
  pooled_rows(w, p, Slot::k_pooled, Access::read, p.k_type, p.head_dim_qk);
  w.key_lengths(p.kv, source_slots(false), Presence::optional);
  w.allow(Slot::q_offset, DType::int64, {p.batch});
  const std::int64_t heads = select_heads(p), tiles = select_tiles(p);
  w.require(Slot::selected_counts, Access::write, DType::int32, {p.batch, heads, tiles});
  w.require(Slot::selected_indices, Access::write, DType::int32, {p.batch, heads, tiles, p.nsa.top});
  if (p.nsa.compressed_top == 0) return;
  w.require(Slot::compressed_counts, Access::write, DType::int32, {p.batch, heads, tiles});
  w.require(Slot::compressed_indices, Access::write, DType::int32, {p.batch, heads, tiles, p.nsa.compressed_top});
}

void check_values(const Problem& p, const Bindings& bindings) {
  check_query_lengths(p, bindings);
  check_source_lengths(p, p.kv, source_slots(false), bindings);
  check_offsets(p, bindings);
  const Tensor& offsets = bindings[Slot::q_offset];
  for (std::int64_t b = 0; offsets && b < p.batch; ++b) {
    const std::int64_t offset = offsets.as<const std::int64_t>()[b];
    if (offset >= 0 && offset % p.nsa.tile == 0) continue;
    refuse_element(Slot::q_offset, b, offset, "0 or more, a multiple of nsa.tile, " + std::to_string(p.nsa.tile));
  }
}

}  // namespace

const OperationRules kNsaSelect = {
    .operation = Operation::nsa_select,
    .name = "nsa_select",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_nsa_field,
    .tensors = tensors,
    .check_values = check_values,
};

}  // namespace tessera::detail
