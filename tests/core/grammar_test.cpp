// SPDX-License-Identifier: Apache-2.0
// The problem line: defaults, round trips, every way to get it wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "expect_error.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

TEST(Grammar, DefaultsFollowTheGivenKeys) {
  const Problem p = Problem::parse("attention sq=7");
  EXPECT_EQ(p.operation, Operation::attention);
  EXPECT_EQ(p.pass, Pass::forward);
  EXPECT_EQ(p.batch, 1);
  EXPECT_EQ(p.kv.seqlen, 7);
  EXPECT_EQ(p.heads_q, 1);
  EXPECT_EQ(p.head_dim_v, 64);
  EXPECT_EQ(p.q_type, DType::fp32);
  EXPECT_EQ(p.metadata, Metadata::clamp);
  EXPECT_FLOAT_EQ(p.softmax_scale(), 0.125F);
  const Problem grouped = Problem::parse("attention sq=7 hq=6 hkv=2 d=32 dtype=bf16");
  EXPECT_EQ(grouped.group(), 3);
  EXPECT_EQ(grouped.head_dim_v, 32);
  EXPECT_EQ(grouped.o_type, DType::bf16);
  const Problem varlen = Problem::parse("attention b=3 sq=7 sk=9 layout=varlen");
  EXPECT_EQ(varlen.total_q, 21);
  EXPECT_EQ(varlen.kv.layout, KvLayout::varlen);
  EXPECT_EQ(varlen.kv.total, 27);
  const Problem paged = Problem::parse("attention b=3 sq=1 sk=33 kv=table page=16");
  EXPECT_EQ(paged.kv.pages, 9);
  EXPECT_TRUE(paged.kv.seqused);
  EXPECT_FALSE(Problem::parse("attention sq=1 kv=csr page=16").kv.seqused);
}

TEST(Grammar, EveryKeySetsItsField) {
  const Problem p = Problem::parse(
      "attention pass=backward b=2 sq=5 sk=6 hq=4 hkv=2 d=16 dv=24 dtype=fp16:bf16:fp32:fp16 layout=varlen tq=11 "
      "kv=dense kv2=varlen sk2=8 tk2=12 seqused_q seqused_k seqused_k2 window=-3:4 compressed_causal=32:16 chunk=128 "
      "scale=0.3 "
      "softcap=20 "
      "alibi score=relative mask=document sink dropout=0.25 block=16x32 list=indices:kv:1:full bwd_list=bitmask:1 lse "
      "residual dlse grad=fp32 accumulate deterministic batch_invariant metadata=trust");
  EXPECT_EQ(p.pass, Pass::backward);
  EXPECT_EQ(p.head_dim_qk, 16);
  EXPECT_EQ(p.head_dim_v, 24);
  EXPECT_EQ(p.q_type, DType::fp16);
  EXPECT_EQ(p.k_type, DType::bf16);
  EXPECT_EQ(p.v_type, DType::fp32);
  EXPECT_EQ(p.o_type, DType::fp16);
  EXPECT_EQ(p.total_q, 11);
  EXPECT_EQ(p.kv.layout, KvLayout::dense);
  ASSERT_TRUE(p.kv2);
  EXPECT_EQ(p.kv2->total, 12);
  EXPECT_TRUE(p.seqused_q && p.kv.seqused && p.kv2->seqused);
  EXPECT_EQ(p.window, (Window{-3, 4}));
  EXPECT_EQ(p.compressed_causal, (CompressedCausal{32, 16}));
  EXPECT_EQ(p.chunk, 128);
  EXPECT_EQ(p.scale, 0.3F);
  EXPECT_EQ(p.softcap, 20.0F);
  EXPECT_TRUE(p.alibi && p.sink);
  EXPECT_EQ(p.score, "relative");
  EXPECT_EQ(p.mask, "document");
  EXPECT_EQ(p.dropout, 0.25F);
  EXPECT_EQ(p.block_q, 16);
  EXPECT_EQ(p.block_kv, 32);
  EXPECT_EQ(p.list, (TileList{TileList::Form::indices, TileList::Heads::kv, false, true}));
  EXPECT_EQ(p.bwd_list, (TileList{TileList::Form::bitmask, TileList::Heads::one, true, false}));
  EXPECT_TRUE(p.lse && p.residual && p.dlse && p.grad_fp32 && p.accumulate && p.deterministic && p.batch_invariant);
  EXPECT_EQ(p.metadata, Metadata::trust);
  EXPECT_EQ(p.query_blocks(), 1);
  EXPECT_EQ(p.key_blocks_first(), 1);
  EXPECT_EQ(p.key_blocks(), 2);
  EXPECT_EQ(p.list_heads(p.list), 2);
  EXPECT_EQ(p.list_heads(p.bwd_list), 1);
  EXPECT_EQ(p.list_heads(TileList{}), 4);

  const Problem f = Problem::parse("attention sq=4 next=bitmask threshold=0.5 mass=rms mass_lse=prior");
  EXPECT_EQ(f.next, TileList::Form::bitmask);
  EXPECT_EQ(f.next_threshold, 0.5F);
  EXPECT_EQ(f.mass, MassKind::rms);
  EXPECT_TRUE(f.mass_prior_lse);

  const Problem s = Problem::parse("attention sq=4 list=bitmask skip=mass");
  EXPECT_EQ(s.skip, (SkipRule{SkipRule::Kind::mass, false, 1}));
  EXPECT_EQ(s.to_string(), "attention sq=4 list=bitmask skip=mass");
  EXPECT_EQ(Problem::parse("attention sq=4 list=bitmask skip=mass:own").skip,
            (SkipRule{SkipRule::Kind::mass, true, 1}));
  EXPECT_EQ(Problem::parse("attention sq=4 list=bitmask skip=mass:prior:7").skip,
            (SkipRule{SkipRule::Kind::mass, false, 7}));
  EXPECT_EQ(Problem::parse("attention sq=4 list=bitmask skip=threshold").skip.kind, SkipRule::Kind::threshold);
  for (const char* text : {"all", "mass:", "mass:last", "mass:own:x", "mass:own:1:2", "threshold:own", ""}) {
    expect_error([&] { Problem::parse(std::string("attention sq=4 list=bitmask skip=") + text); }, ErrorCode::parse,
                 "skip");
  }

  const Problem c = Problem::parse("combine sq=4 parts=5 sink lse");
  EXPECT_EQ(c.operation, Operation::combine);
  EXPECT_EQ(c.combine.parts, 5);
  const Problem a = Problem::parse("kv_append sq=4 sk=64 kv=csr page=8 pages=99 rotary=interleaved:32");
  EXPECT_EQ(a.append.rotary, Rotary::interleaved);
  EXPECT_EQ(a.append.rotary_dim, 32);
  EXPECT_EQ(a.kv.pages, 99);
  EXPECT_TRUE(a.kv.seqused);
  const Problem l = Problem::parse("linear_decode b=3 t=4 h=8 d=128 dtype=bf16 state=bf16 layout=kv slots=9 scale=0.5");
  EXPECT_EQ(l.operation, Operation::linear_decode);
  EXPECT_EQ(l.seqlen_q, 4);
  EXPECT_EQ(l.heads_q, 8);
  EXPECT_EQ(l.heads_kv, 8);
  EXPECT_EQ(l.linear.state_type, DType::bf16);
  EXPECT_EQ(l.linear.state_layout, StateLayout::kv);
  EXPECT_EQ(l.linear.states, 9);
  EXPECT_EQ(l.scale, 0.5F);
  EXPECT_EQ(Problem::parse("linear_decode b=3").linear.states, 3);
  EXPECT_EQ(Problem::parse("linear_decode b=3").linear.ring, 0);
  EXPECT_EQ(Problem::parse("linear_decode t=4 ring=16").linear.ring, 16);
  EXPECT_FALSE(Problem::parse("linear_decode t=4 ring=16").only_flushes());
  EXPECT_TRUE(Problem::parse("linear_decode t=0 ring=16").only_flushes());
  const Problem w = Problem::parse("linear_chunk pass=backward b=3 t=400 h=8 varlen tq=700 slots=9 layout=kv");
  EXPECT_EQ(w.operation, Operation::linear_chunk);
  EXPECT_EQ(w.pass, Pass::backward);
  EXPECT_EQ(w.q_layout, Layout::varlen);
  EXPECT_EQ(w.seqlen_q, 400);
  EXPECT_EQ(w.total_q, 700);
  EXPECT_EQ(w.linear.states, 9);
  EXPECT_EQ(Problem::parse("linear_chunk b=3 t=5").linear.states, 0);
  EXPECT_EQ(Problem::parse("linear_chunk b=3 t=5 varlen").total_q, 15);
}

TEST(Grammar, LinesAreShortestAndInOrder) {
  const struct {
    const char* given;
    const char* written;
  } rows[] = {
      {"attention sq=5", "attention sq=5"},
      {"  attention\tsq=5   b=1 sk=5 hq=1 hkv=1 d=64 dv=64 ", "attention sq=5"},
      {"attention sq=5 dtype=fp32:fp32:fp32:fp32", "attention sq=5"},
      {"attention sq=5 dtype=bf16:bf16:bf16:fp32", "attention sq=5 dtype=bf16:bf16:bf16:fp32"},
      {"attention causal sq=5", "attention sq=5 causal"},
      {"attention window=*:0 sq=5", "attention sq=5 causal"},
      {"attention window=*:* sq=5", "attention sq=5"},
      {"attention window=-2:* sq=5", "attention sq=5 window=-2:*"},
      {"attention sq=5 scale=0.1", "attention sq=5 scale=0.1"},
      {"attention sq=5 scale=0.10000000149", "attention sq=5 scale=0.1"},
      {"attention sq=5 layout=varlen kv=varlen tq=5 tk=5", "attention sq=5 layout=varlen"},
      {"attention sq=5 kv=table page=2 pages=3 seqused_k", "attention sq=5 kv=table page=2"},
      {"attention sq=5 list=indices:q:b", "attention sq=5 list=indices"},
      {"attention sq=5 list=transposed:q:1", "attention sq=5 list=transposed:q:1"},
      {"attention sq=5 list=bitmask:q:b:full", "attention sq=5 list=bitmask:q:b:full"},
      {"combine parts=2 sq=3 lse", "combine sq=3 lse"},
      {"kv_append seqused_k sq=3", "kv_append sq=3"},
      {"linear_decode", "linear_decode"},
      {"linear_decode layout=vk state=fp32 slots=2 dv=64 t=1 b=2", "linear_decode b=2"},
      {"linear_decode metadata=report scale=1 layout=kv slots=0 h=3",
       "linear_decode h=3 layout=kv slots=0 scale=1 metadata=report"},
      {"linear_decode rounding=nearest", "linear_decode"},
      {"linear_decode rounding=stochastic ring=8 state=bf16", "linear_decode state=bf16 ring=8 rounding=stochastic"},
      {"linear_decode ring=0 scale=1 t=2", "linear_decode t=2 scale=1"},
      {"linear_decode scale=1 ring=8 slots=4 t=0", "linear_decode t=0 slots=4 ring=8 scale=1"},
      {"linear_chunk slots=0 dtype=bf16 pass=forward t=9 b=2 layout=vk", "linear_chunk b=2 t=9 dtype=bf16"},
      {"linear_chunk tq=18 varlen t=9 b=2 slots=2 pass=backward", "linear_chunk pass=backward b=2 t=9 varlen slots=2"},
  };
  for (const auto& row : rows) EXPECT_EQ(Problem::parse(row.given).to_string(), row.written) << row.given;
}

TEST(Grammar, EveryParseErrorNamesItsKey) {
  const struct {
    const char* text;
    const char* argument;
  } rows[] = {
      {"", "operation"},
      {"   ", "operation"},
      {"atention sq=1", "operation"},
      {"sq=1", "operation"},
      {"attention", "sq"},
      {"attention sq", "sq"},
      {"attention sq=", "sq"},
      {"attention sq=x", "sq"},
      {"attention sq=1.5", "sq"},
      {"attention sq=1x", "sq"},
      {"attention sq=+1", "sq"},
      {"attention sq=9223372036854775808", "sq"},
      {"attention sq=1 sq=1", "sq"},
      {"attention sq=1 causal causal", "causal"},
      {"attention sq=1 causal=1", "causal"},
      {"attention sq=1 causal window=*:0", "window"},
      {"attention sq=1 width=3", "width"},
      {"attention sq=1 Causal", "Causal"},
      {"attention sq=1 =3", ""},
      {"attention sq=1 pass=sideways", "pass"},
      {"attention sq=1 layout=paged", "layout"},
      {"attention sq=1 kv=paged", "kv"},
      {"attention sq=1 kv=table", "page"},
      {"attention sq=1 kv2=dense", "sk2"},
      {"attention sq=1 sk2=3", "sk2"},
      {"attention sq=1 kv2=csr sk2=4", "page2"},
      {"attention sq=1 dtype=fp31", "dtype"},
      {"attention sq=1 dtype=fp32:fp32", "dtype"},
      {"attention sq=1 dtype=", "dtype"},
      {"attention sq=1 window=3", "window"},
      {"attention sq=1 window=1:2:3", "window"},
      {"attention sq=1 window=a:2", "window"},
      {"attention sq=1 compressed_causal=3", "compressed_causal"},
      {"attention sq=1 compressed_causal=3:", "compressed_causal"},
      {"attention sq=1 scale=fast", "scale"},
      {"attention sq=1 scale=1e99", "scale"},
      {"attention sq=1 scale=1e", "scale"},
      {"attention sq=1 block=64", "block"},
      {"attention sq=1 block=64x", "block"},
      {"attention sq=1 block=64x64x64", "block"},
      {"attention sq=1 list=none", "list"},
      {"attention sq=1 list=indices:x", "list"},
      {"attention sq=1 list=indices:q:2", "list"},
      {"attention sq=1 list=indices:q:b:half", "list"},
      {"attention sq=1 list=indices:q:b:full:x", "list"},
      {"attention pass=backward sq=1 bwd_list=rows", "bwd_list"},
      {"attention sq=1 next=transposed", "next"},
      {"attention sq=1 mass=sum", "mass"},
      {"attention sq=1 mass=mean mass_lse=theirs", "mass_lse"},
      {"attention pass=backward sq=1 grad=fp16", "grad"},
      {"attention sq=1 metadata=ignore", "metadata"},
      {"kv_append sq=1 rotary=half", "rotary"},
      {"kv_append sq=1 rotary=whole:8", "rotary"},
      {"kv_append sq=1 rotary=half:x", "rotary"},
      {"linear_decode sq=1", "sq"},
      {"linear_decode hq=1", "hq"},
      {"linear_decode layout=varlen", "layout"},
      {"linear_decode state=bf17", "state"},
      {"linear_decode varlen", "varlen"},
      {"linear_decode pass=backward", "pass"},
      {"linear_decode ring=some", "ring"},
      {"linear_decode state=bf16 rounding=up", "rounding"},
      {"linear_chunk ring=4", "ring"},
      {"linear_chunk sq=9", "sq"},
      {"linear_chunk pass=both", "pass"},
      {"linear_chunk grad=fp32", "grad"},
      {"attention sq=1 slots=4", "slots"},
      {"attention sq=1 layout=vk", "layout"},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.text);
    expect_error([&] { Problem::parse(row.text); }, ErrorCode::parse, row.argument);
  }
}

TEST(Grammar, HostileTextIsQuotedShortAndPrintable) {
  try {
    Problem::parse(std::string("attention sq=") + std::string(5000, '\x01'));
    FAIL();
  } catch (const Error& error) {
    EXPECT_LT(std::string(error.what()).size(), 200U);
    EXPECT_EQ(std::string(error.what()).find('\x01'), std::string::npos);
  }
}

TEST(Grammar, DefaultsThatOverflowHaveToBeGiven) {
  const std::string sizes = "attention b=99999999999 sq=99999999999 layout=varlen ";
  expect_error([&] { Problem::parse(sizes); }, ErrorCode::overflow, "tq");
  expect_error([&] { Problem::parse(sizes + "tq=5"); }, ErrorCode::overflow, "tk");
}

/// A problem with every field drawn at random, some of them inconsistent; the caller keeps those that check() accepts.
class RandomProblem {
 public:
  explicit RandomProblem(std::uint64_t seed) : random_(seed) {}

  Problem draw() {
    Problem p;
    p.operation = pick({Operation::attention, Operation::attention, Operation::combine, Operation::kv_append,
                        Operation::linear_decode, Operation::linear_chunk});
    const bool attention = p.operation == Operation::attention;
    if (p.is_linear()) return linear(p);
    p.batch = below(5);
    p.seqlen_q = below(300);
    p.heads_kv = 1 + below(4);
    p.heads_q = p.heads_kv * (1 + below(4));
    p.head_dim_qk = 8 * (1 + below(32));
    p.head_dim_v = rarely() ? 8 * (1 + below(32)) : p.head_dim_qk;
    p.q_type = float_type();
    p.k_type = rarely() ? float_type() : p.q_type;
    p.v_type = rarely() ? float_type() : p.q_type;
    p.o_type = rarely() ? float_type() : p.q_type;
    p.q_layout = pick({Layout::dense, Layout::varlen});
    if (p.q_layout == Layout::varlen) p.total_q = rarely() ? below(1000) : p.batch * p.seqlen_q;
    p.kv.seqlen = rarely() ? p.seqlen_q : below(300);
    p.kv.seqused = p.operation == Operation::kv_append;
    if (p.operation != Operation::combine) source(p, p.kv);
    p.lse = p.operation != Operation::kv_append && coin();
    p.sink = p.operation != Operation::kv_append && coin();
    p.deterministic = coin();
    p.batch_invariant = coin();
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    if (p.operation == Operation::combine) p.combine.parts = 1 + below(9);
    if (p.operation == Operation::kv_append && coin()) {
      p.append.rotary = pick({Rotary::half, Rotary::interleaved});
      p.append.rotary_dim = 2 * (1 + below(p.head_dim_qk / 2));
    }
    if (attention) attention_fields(p);
    return p;
  }

 private:
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }
  bool coin() { return below(2) == 1; }
  bool rarely() { return below(4) == 0; }
  float number() { return std::ldexp(static_cast<float>(1 + below(1 << 20)), static_cast<int>(below(20)) - 30); }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[below(static_cast<std::int64_t>(of.size()))];
  }
  Problem linear(Problem p) {
    p.batch = below(5);
    if (p.operation == Operation::linear_chunk) {
      p.pass = pick({Pass::forward, Pass::backward});
      p.q_layout = pick({Layout::dense, Layout::varlen});
      if (p.q_layout == Layout::varlen) p.total_q = below(40);
    }
    p.seqlen_q = below(10);
    p.heads_q = p.heads_kv = 1 + below(6);
    p.head_dim_qk = 8 * (1 + below(32));
    p.head_dim_v = rarely() ? 8 * (1 + below(32)) : p.head_dim_qk;
    p.q_type = p.k_type = p.v_type = p.o_type = float_type();
    if (rarely()) p.v_type = float_type();
    p.linear.state_type = pick({DType::fp32, DType::bf16});
    p.linear.state_layout = pick({StateLayout::vk, StateLayout::kv});
    p.linear.states = rarely() ? p.batch : below(100);
    if (p.operation == Operation::linear_decode && coin()) p.linear.ring = 5 + below(60);
    if (p.linear.state_type == DType::bf16 && p.operation == Operation::linear_decode && coin()) {
      p.linear.rounding = Rounding::stochastic;
    }
    if (coin()) p.scale = number();
    p.deterministic = coin();
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    return p;
  }
  DType float_type() { return pick({DType::fp32, DType::fp16, DType::bf16, DType::e4m3}); }
  TileList list() {
    if (coin()) return {};
    return {pick({TileList::Form::indices, TileList::Form::bitmask, TileList::Form::transposed}),
            pick({TileList::Heads::one, TileList::Heads::kv, TileList::Heads::q}), coin(), coin()};
  }
  void source(const Problem& p, KvSource& kv) {
    kv.layout = pick({KvLayout::dense, KvLayout::varlen, KvLayout::paged_table, KvLayout::paged_csr});
    if (kv.layout == KvLayout::varlen) kv.total = rarely() ? below(1000) : p.batch * kv.seqlen;
    if (kv.layout == KvLayout::paged_table || kv.layout == KvLayout::paged_csr) {
      kv.page_size = 1 + below(70);
      kv.pages = rarely() ? below(100) : p.batch * ((kv.seqlen + kv.page_size - 1) / kv.page_size);
    }
    if (kv.layout == KvLayout::paged_table) kv.seqused = true;
    if ((kv.layout == KvLayout::dense || kv.layout == KvLayout::varlen) && coin()) kv.seqused = true;
  }
  void attention_fields(Problem& p) {
    p.seqused_q = coin();
    if (coin()) {
      p.kv2.emplace();
      p.kv2->seqlen = below(300);
      source(p, *p.kv2);
    }
    if (coin()) p.scale = number();
    if (coin()) p.softcap = number();
    p.alibi = coin();
    p.score = pick({"", "", "relative", "my.score-2"});
    p.mask = pick({"", "", "document", "user/mask:7"});
    if (coin()) p.window.left = below(200) - 100;
    if (coin()) p.window.right = below(200) - 100;
    if (rarely()) p.window = {std::nullopt, 0};
    if (rarely()) p.compressed_causal = CompressedCausal{1 + below(64), 1 + below(64)};
    if (rarely()) p.chunk = 1 + below(64);
    if (coin()) p.dropout = static_cast<float>(below(1000)) / 1000.0F;
    if (coin()) p.block_q = 1 + below(200);
    if (coin()) p.block_kv = 1 + below(200);
    p.list = list();
    p.residual = p.o_type != DType::fp32 && coin();
    if (coin()) {
      p.pass = Pass::backward;
      p.bwd_list = list();
      p.dlse = coin();
      p.grad_fp32 = coin();
      p.accumulate = p.grad_fp32 && coin();
    }
    p.next = pick({TileList::Form::none, TileList::Form::indices, TileList::Form::bitmask});
    if (p.next != TileList::Form::none && coin()) p.next_threshold = number();
    p.mass = pick({MassKind::none, MassKind::mean, MassKind::rms});
    if (rarely()) {
      p.list = {.form = TileList::Form::bitmask};
      p.skip.kind = pick({SkipRule::Kind::mass, SkipRule::Kind::threshold});
      if (p.skip.kind == SkipRule::Kind::mass) p.skip = {p.skip.kind, coin(), below(256)};
      p.next = TileList::Form::none;
      p.mass = MassKind::none;
      p.next_threshold = 0.0F;
    }
    p.mass_prior_lse = (p.mass != MassKind::none || p.next != TileList::Form::none) && coin();
  }

  std::mt19937_64 random_;
};

TEST(Grammar, RandomProblemsRoundTrip) {
  RandomProblem random(20240917);
  int kept = 0;
  for (int i = 0; i < 30000; ++i) {
    const Problem p = random.draw();
    try {
      p.check();
    } catch (const Error&) {
      continue;
    }
    ++kept;
    const std::string line = p.to_string();
    const Problem back = Problem::parse(line);
    ASSERT_TRUE(back == p) << line;
    ASSERT_EQ(back.to_string(), line);
  }
  EXPECT_GT(kept, 15000);
}

/// Bytes thrown at the grammar: anything but an Error or a problem that round-trips is a defect.
TEST(Grammar, MutatedLinesParseOrThrow) {
  RandomProblem problems(7);
  std::mt19937_64 random(8);
  const std::string alphabet = "=:x*- 0189abkqs\t\xff";
  int parsed = 0;
  for (int i = 0; i < 30000; ++i) {
    std::string line = problems.draw().to_string();
    for (std::uint64_t edits = random() % 3; edits > 0; --edits) {
      line[random() % line.size()] = alphabet[random() % alphabet.size()];
    }
    try {
      const Problem p = Problem::parse(line);
      ASSERT_TRUE(Problem::parse(p.to_string()) == p) << line;
      ++parsed;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(parsed, 5000);
}

}  // namespace
TEST(Grammar, WordsOfTheVersionBeforeAreRead) {
  EXPECT_EQ(Problem::parse("attention sq=4 band=1:0"), Problem::parse("attention sq=4 window=1:0"));
  EXPECT_EQ(Problem::parse("attention sq=4 affine=4:2"), Problem::parse("attention sq=4 compressed_causal=4:2"));
  EXPECT_EQ(Problem::parse("attention sq=4 band=1:0").to_string(), "attention sq=4 window=1:0");
  EXPECT_THROW(Problem::parse("attention sq=4 band=1:0 window=1:0"), Error);
}

}  // namespace tessera
