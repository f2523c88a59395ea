// SPDX-License-Identifier: Apache-2.0
// Problem::parse: the grammar of docs/grammar.md.
#include <charconv>
#include <vector>

#include "problem/grammar.h"
#include "problem/line_reader.h"
#include "tessera/error.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

using namespace detail;

std::int64_t or_default(const LineReader& line, std::string_view key, std::optional<std::int64_t> fallback) {
  if (const auto value = line.integer(key)) return *value;
  if (fallback) return *fallback;
  throw Error(ErrorCode::overflow, std::string(key), "a default that does not fit in 64 bits", "the key given");
}

void read_types(const LineReader& line, Problem& p) {
  const auto text = line.value("dtype");
  if (!text) return;
  const auto fields = split(*text, ':');
  if (fields.size() != 1 && fields.size() != 4) line.reject("dtype", *text, "one type, or four as q:k:v:o");
  p.q_type = parse_dtype(fields.front(), "dtype");
  p.k_type = parse_dtype(fields[fields.size() == 4 ? 1 : 0], "dtype");
  p.v_type = parse_dtype(fields[fields.size() == 4 ? 2 : 0], "dtype");
  p.o_type = parse_dtype(fields.back(), "dtype");
}

void read_sizes(const LineReader& line, Problem& p) {
  p.batch = line.integer("b").value_or(1);
  const auto seqlen_q = line.integer("sq");
  if (!seqlen_q) line.fail("sq", "no value", "sq=N, the number of query rows");
  p.seqlen_q = *seqlen_q;
  p.kv.seqlen = line.integer("sk").value_or(p.seqlen_q);
  p.heads_q = line.integer("hq").value_or(1);
  p.heads_kv = line.integer("hkv").value_or(p.heads_q);
  p.head_dim_qk = line.integer("d").value_or(64);
  p.head_dim_v = line.integer("dv").value_or(p.head_dim_qk);
  read_types(line, p);
  p.q_layout = line.word("layout", kLayouts).value_or(Layout::dense);
  p.total_q = or_default(line, "tq", default_total_q(p));
  p.seqused_q = line.flag("seqused_q");
}

/// Keys with the suffix "" (first source) or "2".
void read_source(const LineReader& line, const Problem& p, KvSource& kv, const std::string& suffix) {
  kv.total = or_default(line, "tk" + suffix, default_total(p, kv));
  const auto page_size = line.integer("page" + suffix);
  if (is_paged(kv.layout) && !page_size) line.fail("page" + suffix, "no value", "the tokens of a page, as page=16");
  kv.page_size = page_size.value_or(0);
  kv.pages = or_default(line, "pages" + suffix, default_pages(p, kv));
  kv.seqused = line.flag("seqused_k" + suffix) || default_seqused(p.operation, kv.layout);
}

void read_sources(const LineReader& line, Problem& p) {
  p.kv.layout = line.word("kv", kKvLayouts).value_or(default_kv_layout(p.operation, p.q_layout));
  read_source(line, p, p.kv, "");
  const auto layout2 = line.word("kv2", kKvLayouts);
  if (!layout2) return;
  KvSource& kv2 = p.kv2.emplace();
  kv2.layout = *layout2;
  const auto seqlen2 = line.integer("sk2");
  if (!seqlen2) line.fail("sk2", "no value", "sk2=N, the keys of the second source");
  kv2.seqlen = *seqlen2;
  read_source(line, p, kv2, "2");
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
  p.mass = line.word("mass", kMassKinds).value_or(MassKind::none);
  p.mass_prior_lse = line.word("mass_lse", kMassLses).value_or(false);
}

void read_outputs(const LineReader& line, Problem& p) {
  p.lse = line.flag("lse");
  p.dlse = line.flag("dlse");
  if (const auto text = line.value("grad")) {
    if (*text != "fp32") line.reject("grad", *text, "fp32, or the key left out for the types of q, k, v");
    p.grad_fp32 = true;
  }
  p.accumulate = line.flag("accumulate");
  p.parts = line.integer("parts").value_or(2);
  if (const auto text = line.value("rotary")) {
    const auto fields = split(*text, ':');
    if (fields.size() != 2) line.reject("rotary", *text, "half:DIM or interleaved:DIM");
    p.rotary = line.to_word("rotary", fields[0], kRotaries);
    p.rotary_dim = line.to_integer("rotary", fields[1]);
  }
}

/// linear_decode and linear_chunk have words of their own for sizes, and `layout` is their state's.
void read_linear(const LineReader& line, Problem& p) {
  p.batch = line.integer("b").value_or(1);
  p.seqlen_q = line.integer("t").value_or(1);
  p.heads_q = p.heads_kv = line.integer("h").value_or(1);
  p.head_dim_qk = line.integer("d").value_or(64);
  p.head_dim_v = line.integer("dv").value_or(p.head_dim_qk);
  read_types(line, p);
  if (p.operation == Operation::linear_chunk) {
    p.pass = line.word("pass", kPasses).value_or(Pass::forward);
    if (line.flag("varlen")) p.q_layout = Layout::varlen;
    p.total_q = or_default(line, "tq", default_total_q(p));
  }
  if (const auto text = line.value("state")) p.state_type = parse_dtype(*text, "state");
  p.state_layout = line.word("layout", kStateLayouts).value_or(StateLayout::vk);
  p.slots = line.integer("slots").value_or(default_slots(p));
  if (p.operation == Operation::linear_decode) {
    p.ring = line.integer("ring").value_or(0);
    p.rounding = line.word("rounding", kRoundings).value_or(Rounding::nearest);
  }
  p.scale = line.number("scale");
}

void read_promises(const LineReader& line, Problem& p) {
  p.deterministic = line.flag("deterministic");
  p.batch_invariant = line.flag("batch_invariant");
  p.metadata = line.word("metadata", kMetadatas).value_or(Metadata::clamp);
}

}  // namespace

Problem Problem::parse(std::string_view text) {
  const LineReader line(text);
  Problem p;
  p.operation = line.to_word("operation", line.operation(), kOperations);
  if (p.is_linear()) {
    read_linear(line, p);
  } else {
    p.pass = line.word("pass", kPasses).value_or(Pass::forward);
    read_sizes(line, p);
    read_sources(line, p);
    read_scores_and_masks(line, p);
    read_tiles(line, p);
    read_outputs(line, p);
  }
  read_promises(line, p);
  line.check_all_used();
  p.check();
  return p;
}

}  // namespace tessera
