// SPDX-License-Identifier: Apache-2.0
// The problem line of attention, combine and kv_append: defaults, round trips, every way to get it wrong.
#include <gtest/gtest.h>

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

TEST(Grammar, WordsOfTheVersionBeforeAreRead) {
  EXPECT_EQ(Problem::parse("attention sq=4 band=1:0"), Problem::parse("attention sq=4 window=1:0"));
  EXPECT_EQ(Problem::parse("attention sq=4 affine=4:2"), Problem::parse("attention sq=4 compressed_causal=4:2"));
  EXPECT_EQ(Problem::parse("attention sq=4 band=1:0").to_string(), "attention sq=4 window=1:0");
  EXPECT_THROW(Problem::parse("attention sq=4 band=1:0 window=1:0"), Error);
}

}  // namespace
}  // namespace tessera
