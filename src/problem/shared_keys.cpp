// SPDX-License-Identifier: Apache-2.0
#include "problem/shared_keys.h"

#include "base/checked.h"
#include "problem/grammar.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

std::optional<std::int64_t> default_pages(const Problem& p, const KvSource& kv) noexcept {
  if (!is_paged(kv.layout) || kv.page_size < 1 || kv.seqlen < 0) return 0;
  return checked_multiply(p.batch, ceil_div(kv.seqlen, kv.page_size));
}

bool default_seqused(const SourceDefaults& defaults, KvLayout layout) noexcept {
  return defaults.seqused || layout == KvLayout::paged_table;
}

std::string types_text(const Problem& p) {
  std::string text(to_string(p.q_type));
  if (p.k_type == p.q_type && p.v_type == p.q_type && p.o_type == p.q_type) return text;
  for (const DType type : {p.k_type, p.v_type, p.o_type}) text.append(":").append(to_string(type));
  return text;
}

}  // namespace

std::int64_t or_default(const LineReader& line, std::string_view key, std::optional<std::int64_t> fallback) {
  if (const auto value = line.integer(key)) return *value;
  if (fallback) return *fallback;
  throw Error(ErrorCode::overflow, std::string(key), "a default that does not fit in 64 bits", "the key given");
}

std::optional<std::int64_t> default_total_q(const Problem& p) noexcept {
  return p.q_layout == Layout::varlen ? checked_multiply(p.batch, p.seqlen_q) : 0;
}

std::optional<std::int64_t> default_total(const Problem& p, const KvSource& kv) noexcept {
  return kv.layout == KvLayout::varlen ? checked_multiply(p.batch, kv.seqlen) : 0;
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

void write_types(LineWriter& line, const Problem& p) {
  const std::string types = types_text(p);
  if (types != "fp32") line.word("dtype", types);
}

void read_pass(const LineReader& line, Problem& p) { p.pass = line.word("pass", kPasses).value_or(Pass::forward); }

void write_pass(LineWriter& line, const Problem& p) {
  if (p.pass != Pass::forward) line.word("pass", word_of(kPasses, p.pass));
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
}

void write_sizes(LineWriter& line, const Problem& p) {
  line.integer("b", p.batch, 1);
  line.integer("sq", p.seqlen_q);
  line.integer("sk", p.kv.seqlen, p.seqlen_q);
  line.integer("hq", p.heads_q, 1);
  line.integer("hkv", p.heads_kv, p.heads_q);
  line.integer("d", p.head_dim_qk, 64);
  line.integer("dv", p.head_dim_v, p.head_dim_qk);
  write_types(line, p);
  if (p.q_layout != Layout::dense) line.word("layout", word_of(kLayouts, p.q_layout));
  line.integer("tq", p.total_q, default_total_q(p));
}

void read_source(const LineReader& line, const Problem& p, KvSource& kv, const SourceDefaults& defaults,
                 const std::string& suffix) {
  kv.layout = line.word("kv" + suffix, kKvLayouts).value_or(defaults.layout);
  kv.total = or_default(line, "tk" + suffix, default_total(p, kv));
  const auto page_size = line.integer("page" + suffix);
  if (is_paged(kv.layout) && !page_size) line.fail("page" + suffix, "no value", "the tokens of a page, as page=16");
  kv.page_size = page_size.value_or(0);
  kv.pages = or_default(line, "pages" + suffix, default_pages(p, kv));
  kv.seqused = line.flag("seqused_k" + suffix) || default_seqused(defaults, kv.layout);
}

void write_source(LineWriter& line, const Problem& p, const KvSource& kv, const SourceDefaults& defaults,
                  const std::string& suffix) {
  const bool second = !suffix.empty();
  if (second || kv.layout != defaults.layout) line.word("kv" + suffix, word_of(kKvLayouts, kv.layout));
  if (second) line.integer("sk" + suffix, kv.seqlen);
  line.integer("tk" + suffix, kv.total, default_total(p, kv));
  line.integer("page" + suffix, kv.page_size, 0);
  line.integer("pages" + suffix, kv.pages, default_pages(p, kv));
  line.flag("seqused_k" + suffix, kv.seqused && !default_seqused(defaults, kv.layout));
}

void read_promises(const LineReader& line, Problem& p) {
  p.deterministic = line.flag("deterministic");
  p.batch_invariant = line.flag("batch_invariant");
  p.metadata = line.word("metadata", kMetadatas).value_or(Metadata::clamp);
}

void write_promises(LineWriter& line, const Problem& p) {
  line.flag("deterministic", p.deterministic);
  line.flag("batch_invariant", p.batch_invariant);
  if (p.metadata != Metadata::clamp) line.word("metadata", word_of(kMetadatas, p.metadata));
}

}  // namespace tessera::detail
