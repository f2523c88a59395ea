// SPDX-License-Identifier: Apache-2.0
// Attention's keys of the problem line.
#include "operations/attention.h"

#include "operations/descales.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_keys.h"

namespace tessera::detail {
namespace {

constexpr Word<MassKind> kMassKinds[] = {{"mean", MassKind::mean}, {"rms", MassKind::rms}};
constexpr Word<bool> kMassLses[] = {{"own", false}, {"prior", true}};
constexpr Word<TileList::Form> kForms[] = {{"indices", TileList::Form::indices},
                                           {"bitmask", TileList::Form::bitmask},
                                           {"transposed", TileList::Form::transposed}};
constexpr Word<TileList::Form> kNextForms[] = {{"indices", TileList::Form::indices},
                                               {"bitmask", TileList::Form::bitmask}};
constexpr Word<TileList::Heads> kListHeads[] = {
    {"q", TileList::Heads::q}, {"kv", TileList::Heads::kv}, {"1", TileList::Heads::one}};
constexpr Word<SkipRule::Kind> kSkipRules[] = {{"mass", SkipRule::Kind::mass},
                                               {"threshold", SkipRule::Kind::threshold}};
constexpr Word<bool> kSkipLses[] = {{"prior", false}, {"own", true}};
constexpr Word<bool> kListBatches[] = {{"b", true}, {"1", false}};

SourceDefaults first_source(const Problem& p) noexcept {
  return {p.q_layout == Layout::varlen ? KvLayout::varlen : KvLayout::dense, false};
}

void read_sources(const LineReader& line, Problem& p) {
  p.seqused_q = line.flag("seqused_q");
  read_source(line, p, p.kv, first_source(p));
  const auto layout2 = line.word("kv2", kKvLayouts);
  if (!layout2) return;
  KvSource& kv2 = p.kv2.emplace();
  const auto seqlen2 = line.integer("sk2");
  if (!seqlen2) line.fail("sk2", "no value", "sk2=N, the keys of the second source");
  kv2.seqlen = *seqlen2;
  read_source(line, p, kv2, {*layout2}, "2");
}

Window read_window(const LineReader& line) {
  const auto text = line.value("window");
  const bool causal = line.flag("causal");
  if (causal && text) line.fail("window", "both causal and window", "one of them; causal is window=*:0");
  if (causal) return {std::nullopt, 0};
  if (!text) return {};
  const auto fields = split(*text, ':');
  if (fields.size() != 2) line.reject("window", *text, "L:R, each a signed integer or *");
  Window window;
  if (fields[0] != "*") window.left = line.to_integer("window", fields[0]);
  if (fields[1] != "*") window.right = line.to_integer("window", fields[1]);
  return window;
}

void read_scores_and_masks(const LineReader& line, Problem& p) {
  p.window = read_window(line);
  if (const auto text = line.value("compressed_causal")) {
    const auto fields = split(*text, ':');
    if (fields.size() != 2) line.reject("compressed_causal", *text, "length:stride");
    p.compressed_causal = CompressedCausal{line.to_integer("compressed_causal", fields[0]),
                                           line.to_integer("compressed_causal", fields[1])};
  }
  p.chunk = line.integer("chunk").value_or(0);
  p.scale = line.number("scale");
  p.softcap = line.number("softcap").value_or(0.0F);
  p.alibi = line.flag("alibi");
  p.score = line.value("score").value_or("");
  p.mask = line.value("mask").value_or("");
  p.sink = line.flag("sink");
  p.dropout = line.number("dropout").value_or(0.0F);
}

TileList read_list(const LineReader& line, std::string_view key) {
  const auto text = line.value(key);
  TileList list;
  if (!text) return list;
  const auto fields = split(*text, ':');
  if (fields.size() > 4) line.reject(key, *text, "FORM[:HEADS[:BATCH[:full]]]");
  list.form = line.to_word(key, fields[0], kForms);
  if (fields.size() > 1) list.heads = line.to_word(key, fields[1], kListHeads);
  if (fields.size() > 2) list.per_batch = line.to_word(key, fields[2], kListBatches);
  if (fields.size() > 3) {
    if (fields[3] != "full") line.reject(key, *text, "full, or nothing, as the fourth field");
    list.full = true;
  }
  return list;
}

SkipRule read_skip(const LineReader& line) {
  const auto text = line.value("skip");
  SkipRule skip;
  if (!text) return skip;
  const auto fields = split(*text, ':');
  skip.kind = line.to_word("skip", fields[0], kSkipRules);
  if (fields.size() > (skip.kind == SkipRule::Kind::mass ? 3 : 1)) {
    line.reject("skip", *text, "mass[:prior|own[:GROWTH]] or threshold");
  }
  if (fields.size() > 1) skip.own_lse = line.to_word("skip", fields[1], kSkipLses);
  if (fields.size() > 2) skip.growth = line.to_integer("skip", fields[2]);
  return skip;
}

void read_tiles(const LineReader& line, Problem& p) {
  if (const auto text = line.value("block")) {
    const auto fields = split(*text, 'x');
    if (fields.size() != 2) line.reject("block", *text, "QxK, as 64x64");
    p.block_q = line.to_integer("block", fields[0]);
    p.block_kv = line.to_integer("block", fields[1]);
  }
  p.list = read_list(line, "list");
  p.bwd_list = read_list(line, "bwd_list");
  p.next = line.word("next", kNextForms).value_or(TileList::Form::none);
  p.next_threshold = line.number("threshold").value_or(0.0F);
  p.skip = read_skip(line);
  p.mass = line.word("mass", kMassKinds).value_or(MassKind::none);
  p.mass_prior_lse = line.word("mass_lse", kMassLses).value_or(false);
}

void read_outputs(const LineReader& line, Problem& p) {
  p.lse = line.flag("lse");
  p.residual = line.flag("residual");
  p.dlse = line.flag("dlse");
  if (const auto text = line.value("grad")) {
    if (*text != "fp32") line.reject("grad", *text, "fp32, or the key left out for the types of q, k, v");
    p.grad_fp32 = true;
  }
  p.accumulate = line.flag("accumulate");
}

void parse(const LineReader& line, Problem& p) {
  read_pass(line, p);
  read_sizes(line, p);
  read_sources(line, p);
  read_descales(line, p);
  read_scores_and_masks(line, p);
  read_tiles(line, p);
  read_outputs(line, p);
  read_promises(line, p);
}

std::string bound_text(const std::optional<std::int64_t>& bound) { return bound ? std::to_string(*bound) : "*"; }

std::string list_text(const TileList& list) {
  std::string text(word_of(kForms, list.form));
  const int fields = list.full ? 3 : !list.per_batch ? 2 : list.heads != TileList::Heads::q ? 1 : 0;
  if (fields >= 1) text.append(":").append(word_of(kListHeads, list.heads));
  if (fields >= 2) text.append(":").append(word_of(kListBatches, list.per_batch));
  if (fields >= 3) text.append(":full");
  return text;
}

std::string skip_text(const SkipRule& skip) {
  std::string text(word_of(kSkipRules, skip.kind));
  const SkipRule defaults;
  const int fields = skip.growth != defaults.growth ? 2 : skip.own_lse ? 1 : 0;
  if (fields >= 1) text.append(":").append(word_of(kSkipLses, skip.own_lse));
  if (fields >= 2) text.append(":").append(std::to_string(skip.growth));
  return text;
}

void write_scores_and_masks(LineWriter& line, const Problem& p) {
  if (p.window == Window{std::nullopt, 0}) {
    line.flag("causal", true);
  } else if (p.window != Window{}) {
    line.word("window", bound_text(p.window.left) + ":" + bound_text(p.window.right));
  }
  if (p.compressed_causal) {
    line.word("compressed_causal",
              std::to_string(p.compressed_causal->length) + ":" + std::to_string(p.compressed_causal->stride));
  }
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
  if (p.skip) line.word("skip", skip_text(p.skip));
  if (p.mass != MassKind::none) line.word("mass", word_of(kMassKinds, p.mass));
  if (p.mass_prior_lse) line.word("mass_lse", word_of(kMassLses, p.mass_prior_lse));
}

void print(LineWriter& line, const Problem& p) {
  write_pass(line, p);
  write_sizes(line, p);
  line.flag("seqused_q", p.seqused_q);
  write_source(line, p, p.kv, first_source(p));
  if (p.kv2) write_source(line, p, *p.kv2, {}, "2");
  write_descales(line, p);
  write_scores_and_masks(line, p);
  write_tiles(line, p);
  line.flag("lse", p.lse);
  line.flag("residual", p.residual);
  line.flag("dlse", p.dlse);
  if (p.grad_fp32) line.word("grad", "fp32");
  line.flag("accumulate", p.accumulate);
  write_promises(line, p);
}

std::string_view own_field(const Problem& p) {
  const struct {
    std::string_view name;
    bool set;
  } fields[] = {{"kv2", p.kv2.has_value()},
                {"softcap", p.softcap != 0.0F},
                {"alibi", p.alibi},
                {"score", !p.score.empty()},
                {"window", p.window != Window{}},
                {"compressed_causal", p.compressed_causal.has_value()},
                {"chunk", p.chunk != 0},
                {"mask", !p.mask.empty()},
                {"dropout", p.dropout != 0.0F},
                {"block_q", p.block_q != 64},
                {"block_kv", p.block_kv != 64},
                {"list", p.list != TileList{}},
                {"bwd_list", p.bwd_list != TileList{}},
                {"next", p.next != TileList::Form::none},
                {"next_threshold", p.next_threshold != 0.0F},
                {"skip", p.skip != SkipRule{}},
                {"mass", p.mass != MassKind::none},
                {"mass_prior_lse", p.mass_prior_lse},
                {"residual", p.residual},
                {"dlse", p.dlse},
                {"grad_fp32", p.grad_fp32},
                {"accumulate", p.accumulate}};
  for (const auto& field : fields) {
    if (field.set) return field.name;
  }
  return {};
}

}  // namespace

const OperationRules kAttention = {
    .operation = Operation::attention,
    .name = "attention",
    .parse = parse,
    .print = print,
    .check = check_attention,
    .own_field = own_field,
    .is_defined = attention_is_defined,
    .tensors = attention_tensors,
    .check_values = check_attention_values,
};

}  // namespace tessera::detail
