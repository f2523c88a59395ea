// SPDX-License-Identifier: Apache-2.0
// The problem line of the linear operations: defaults, round trips, every way to get it wrong.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

TEST(LinearGrammar, EveryKeySetsItsField) {
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

TEST(LinearGrammar, LinesAreShortestAndInOrder) {
  const struct {
    const char* given;
    const char* written;
  } rows[] = {
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

TEST(LinearGrammar, EveryParseErrorNamesItsKey) {
  const struct {
    const char* text;
    const char* argument;
  } rows[] = {
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

}  // namespace
}  // namespace tessera
