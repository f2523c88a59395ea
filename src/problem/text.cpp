// SPDX-License-Identifier: Apache-2.0
// Problem::to_string: the shortest line, keys in the order of docs/grammar.md.
#include <array>
#include <charconv>

#include "problem/grammar.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

using namespace detail;

class LineWriter {
 public:
  explicit LineWriter(std::string_view operation) : text_(operation) {}

  void flag(std::string_view name, bool set) {
    if (set) text_.append(" ").append(name);
  }
  void word(std::string_view key, std::string_view value) { text_.append(" ").append(key).append("=").append(value); }
  void integer(std::string_view key, std::int64_t value) { word(key, std::to_string(value)); }
  void integer(std::string_view key, std::int64_t value, std::optional<std::int64_t> unless) {
    if (!unless || value != *unless) integer(key, value);
  }
  void number(std::string_view key, float value) {
    std::array<char, 32> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    word(key, std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data())));
  }
  void number(std::string_view key, float value, float unless) {
    if (value != unless) number(key, value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

std::string bound_text(const std::optional<std::int64_t>& bound) { return bound ? std::to_string(*bound) : "*"; }

std::string list_text(const TileList& list) {
  std::string text(word_of(kForms, list.form));
  const int fields = list.full ? 3 : !list.per_batch ? 2 : list.heads != TileList::Heads::q ? 1 : 0;
  if (fields >= 1) text.append(":").append(word_of(kListHeads, list.heads));
  if (fields >= 2) text.append(":").append(word_of(kListBatches, list.per_batch));
  if (fields >= 3) text.append(":full");
  return text;
}

std::string types_text(const Problem& p) {
  std::string text(to_string(p.q_type));
  if (p.k_type == p.q_type && p.v_type == p.q_type && p.o_type == p.q_type) return text;
  for (const DType type : {p.k_type, p.v_type, p.o_type}) text.append(":").append(to_string(type));
  return text;
}

void write_sizes(LineWriter& line, const Problem& p) {
  line.integer("b", p.batch, 1);
  line.integer("sq", p.seqlen_q);
  line.integer("sk", p.kv.seqlen, p.seqlen_q);
  line.integer("hq", p.heads_q, 1);
  line.integer("hkv", p.heads_kv, p.heads_q);
  line.integer("d", p.head_dim_qk, 64);
  line.integer("dv", p.head_dim_v, p.head_dim_qk);
  const std::string types = types_text(p);
  if (types != "fp32") line.word("dtype", types);
  if (p.q_layout != Layout::dense) line.word("layout", word_of(kLayouts, p.q_layout));
  line.integer("tq", p.total_q, default_total_q(p));
}

void write_source(LineWriter& line, const Problem& p, const KvSource& kv, bool second) {
  const std::string suffix = second ? "2" : "";
  if (second || kv.layout != default_kv_layout(p.operation, p.q_layout)) {
    line.word("kv" + suffix, word_of(kKvLayouts, kv.layout));
  }
  if (second) line.integer("sk2", kv.seqlen);
  line.integer("tk" + suffix, kv.total, default_total(p, kv));
  line.integer("page" + suffix, kv.page_size, 0);
  line.integer("pages" + suffix, kv.pages, default_pages(p, kv));
  line.flag("seqused_k" + suffix, kv.seqused && !default_seqused(p.operation, kv.layout));
}

void write_scores_and_masks(LineWriter& line, const Problem& p) {
  if (p.window == Window{std::nullopt, 0}) {
    line.flag("causal", true);
  } else if (p.window != Window{}) {
    line.word("window", bound_text(p.window.left) + ":" + bound_text(p.window.right));
  }
  if (p.compressed_causal)
    line.word("compressed_causal",
              std::to_string(p.compressed_causal->length) + ":" + std::to_string(p.compressed_causal->stride));
  line.integer("chunk", p.chunk, 0);
  if (p.scale) line.number("scale", *p.scale);
  line.number("softcap", p.softcap, 0.0F);
  line.flag("alibi", p.alibi);
  if (!p.score.empty()) line.word("score", p.score);
  if (!p.mask.empty()) line.word("mask", p.mask);
  line.flag("sink", p.sink);
  line.number("dropout", p.dropout, 0.0F);
}

void write_tiles(LineWriter& line, const Problem& p) {
  if (p.block_q != 64 || p.block_kv != 64) {
    line.word("block", std::to_string(p.block_q) + "x" + std::to_string(p.block_kv));
  }
  if (p.list) line.word("list", list_text(p.list));
  if (p.bwd_list) line.word("bwd_list", list_text(p.bwd_list));
  if (p.next != TileList::Form::none) line.word("next", word_of(kForms, p.next));
  line.number("threshold", p.next_threshold, 0.0F);
  if (p.mass != MassKind::none) line.word("mass", word_of(kMassKinds, p.mass));
  if (p.mass_prior_lse) line.word("mass_lse", word_of(kMassLses, p.mass_prior_lse));
}

void write_linear(LineWriter& line, const Problem& p) {
  if (p.pass != Pass::forward) line.word("pass", word_of(kPasses, p.pass));
  line.integer("b", p.batch, 1);
  line.integer("t", p.seqlen_q, 1);
  line.integer("h", p.heads_q, 1);
  line.integer("d", p.head_dim_qk, 64);
  line.integer("dv", p.head_dim_v, p.head_dim_qk);
  const std::string types = types_text(p);
  if (types != "fp32") line.word("dtype", types);
  line.flag("varlen", p.q_layout == Layout::varlen);
  line.integer("tq", p.total_q, default_total_q(p));
  if (p.state_type != DType::fp32) line.word("state", to_string(p.state_type));
  if (p.state_layout != StateLayout::vk) line.word("layout", word_of(kStateLayouts, p.state_layout));
  line.integer("slots", p.slots, default_slots(p));
  line.integer("ring", p.ring, 0);
  if (p.rounding != Rounding::nearest) line.word("rounding", word_of(kRoundings, p.rounding));
  if (p.scale) line.number("scale", *p.scale);
}

void write_promises(LineWriter& line, const Problem& p) {
  line.flag("deterministic", p.deterministic);
  line.flag("batch_invariant", p.batch_invariant);
  if (p.metadata != Metadata::clamp) line.word("metadata", word_of(kMetadatas, p.metadata));
}

}  // namespace

std::string Problem::to_string() const {
  LineWriter line(word_of(kOperations, operation));
  if (is_linear()) {
    write_linear(line, *this);
    write_promises(line, *this);
    return line.take();
  }
  if (pass != Pass::forward) line.word("pass", word_of(kPasses, pass));
  write_sizes(line, *this);
  line.flag("seqused_q", seqused_q);
  write_source(line, *this, kv, false);
  if (kv2) write_source(line, *this, *kv2, true);
  write_scores_and_masks(line, *this);
  write_tiles(line, *this);
  line.flag("lse", lse);
  line.flag("dlse", dlse);
  if (grad_fp32) line.word("grad", "fp32");
  line.flag("accumulate", accumulate);
  write_promises(line, *this);
  line.integer("parts", parts, 2);
  if (rotary != Rotary::none) {
    line.word("rotary", std::string(word_of(kRotaries, rotary)) + ":" + std::to_string(rotary_dim));
  }
  return line.take();
}

}  // namespace tessera
