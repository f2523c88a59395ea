// SPDX-License-Identifier: Apache-2.0
// The table of operations: every operation has its own keys and fields, and refuses those of the others.
#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>

#include "expect_error.h"
#include "problem/operation.h"

namespace tessera {
namespace {

/// The shortest line of each operation, in the order of enum Operation.
const char* const kLines[] = {"attention sq=8", "combine sq=8",    "kv_append sq=8", "linear_decode", "linear_chunk",
                              "nsa_pool sk=8",  "nsa_select sq=8", "nsa_gate sq=8",  "quantize sq=8"};

struct Field {
  const char* name;
  void (*set)(Problem& problem);
};

/// Which of kFields each operation has: linear_chunk has those of linear_decode, those of NSA share theirs.
constexpr std::size_t kFieldsOf[] = {0, 1, 2, 3, 3, 4, 4, 4, 5};

/// Fields of each operation alone, or of several that share them.
const std::initializer_list<Field> kFields[] = {
    {{"kv2", [](Problem& p) { p.kv2.emplace(); }},
     {"alibi", [](Problem& p) { p.alibi = true; }},
     {"chunk", [](Problem& p) { p.chunk = 4; }},
     {"block_q", [](Problem& p) { p.block_q = 32; }},
     {"block_kv", [](Problem& p) { p.block_kv = 128; }},
     {"mass", [](Problem& p) { p.mass = MassKind::mean; }},
     {"skip", [](Problem& p) { p.skip.kind = SkipRule::Kind::mass; }},
     {"grad_fp32", [](Problem& p) { p.grad_fp32 = true; }}},
    {{"combine.parts", [](Problem& p) { p.combine.parts = 3; }}},
    {{"append.rotary", [](Problem& p) { p.append.rotary = Rotary::half; }},
     {"append.rotary_dim", [](Problem& p) { p.append.rotary_dim = 8; }}},
    {{"linear.states", [](Problem& p) { p.linear.states = 3; }},
     {"linear.state_type", [](Problem& p) { p.linear.state_type = DType::bf16; }},
     {"linear.state_layout", [](Problem& p) { p.linear.state_layout = StateLayout::kv; }},
     {"linear.ring", [](Problem& p) { p.linear.ring = 8; }},
     {"linear.rounding", [](Problem& p) { p.linear.rounding = Rounding::stochastic; }}},
    {{"nsa.length", [](Problem& p) { p.nsa.length = 32; }},
     {"nsa.stride", [](Problem& p) { p.nsa.stride = 16; }},
     {"nsa.project", [](Problem& p) { p.nsa.project = true; }},
     {"nsa.block", [](Problem& p) { p.nsa.block = 32; }},
     {"nsa.top", [](Problem& p) { p.nsa.top = 4; }},
     {"nsa.tile", [](Problem& p) { p.nsa.tile = 32; }},
     {"nsa.query_heads", [](Problem& p) { p.nsa.query_heads = true; }},
     {"nsa.score", [](Problem& p) { p.nsa.score = SelectScore::softmax; }},
     {"nsa.reduce", [](Problem& p) { p.nsa.reduce = TileReduce::max; }},
     {"nsa.visible", [](Problem& p) { p.nsa.visible = BlockVisible::started; }},
     {"nsa.initial", [](Problem& p) { p.nsa.initial = 0; }},
     {"nsa.local", [](Problem& p) { p.nsa.local = 0; }},
     {"nsa.causal", [](Problem& p) { p.nsa.causal = true; }},
     {"nsa.compressed_top", [](Problem& p) { p.nsa.compressed_top = 4; }},
     {"nsa.compressed_block", [](Problem& p) { p.nsa.compressed_block = 32; }},
     {"nsa.gate", [](Problem& p) { p.nsa.gate = GateKind::mean; }}},
    {{"quantization.hadamard", [](Problem& p) { p.quantization.hadamard = true; }},
     {"quantization.given", [](Problem& p) { p.quantization.given = true; }},
     {"quantization.counts", [](Problem& p) { p.quantization.counts = true; }}},
};

std::string want_of(const Problem& problem) {
  try {
    problem.check();
  } catch (const Error& error) {
    return error.want();
  }
  return "";
}

TEST(Operations, AreInTheOrderOfTheEnumeration) {
  std::set<std::string_view> names;
  ASSERT_EQ(detail::operations().size(), std::size(kLines));
  for (std::size_t i = 0; i < std::size(kLines); ++i) {
    const detail::OperationRules& row = *detail::operations()[i];
    EXPECT_EQ(row.operation, static_cast<Operation>(i));
    EXPECT_EQ(&detail::rules_of(row.operation), &row);
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    const Problem problem = Problem::parse(kLines[i]);
    EXPECT_EQ(problem.operation, row.operation);
    EXPECT_EQ(problem.to_string(), kLines[i]);
    for (const detail::OperationRules* other : detail::operations()) {
      if (other->own_field == row.own_field) continue;
      EXPECT_EQ(other->own_field(problem), "") << kLines[i] << ", " << other->name;
    }
  }
}

TEST(Operations, RefuseFieldsOfOthers) {
  for (std::size_t own = 0; own < std::size(kLines); ++own) {
    for (std::size_t other = 0; other < std::size(kLines); ++other) {
      if (kFieldsOf[other] == kFieldsOf[own] || (other > 0 && kFieldsOf[other] == kFieldsOf[other - 1])) continue;
      for (const Field& field : kFields[kFieldsOf[other]]) {
        SCOPED_TRACE(std::string(kLines[own]) + " with " + field.name);
        Problem problem = Problem::parse(kLines[own]);
        field.set(problem);
        expect_error([&] { problem.check(); }, ErrorCode::invalid_argument, field.name);
        const std::string owner(detail::operations()[other]->name);
        EXPECT_EQ(want_of(problem).substr(0, owner.size()), owner);
      }
    }
  }
}

TEST(Operations, DescalesAreOfAttentionAndQuantize) {
  for (const char* line : kLines) {
    Problem problem = Problem::parse(line);
    problem.quantization.grain = Grain::token;
    if (problem.operation == Operation::quantize) {
      EXPECT_NO_THROW(problem.check());
    } else {
      SCOPED_TRACE(line);
      expect_error([&] { problem.check(); }, ErrorCode::invalid_argument, "quantization");
    }
  }
}

TEST(Operations, NameEveryOwnerOfAField) {
  Problem problem = Problem::parse("combine sq=8");
  problem.linear.states = 3;
  EXPECT_EQ(want_of(problem), "linear_decode or linear_chunk; this field has no meaning here");
}

TEST(Operations, KnowNoKeysOfOthers) {
  const struct {
    const char* line;
    const char* key;
  } rows[] = {
      {"attention sq=8 parts=2", "parts"},
      {"attention sq=8 rotary=half:8", "rotary"},
      {"attention sq=8 ring=0", "ring"},
      {"combine sq=8 causal", "causal"},
      {"combine sq=8 softcap=0", "softcap"},
      {"combine sq=8 block=64x64", "block"},
      {"combine sq=8 kv=dense", "kv"},
      {"combine sq=8 seqused_q", "seqused_q"},
      {"combine sq=8 pass=forward", "pass"},
      {"kv_append sq=8 lse", "lse"},
      {"kv_append sq=8 sink", "sink"},
      {"kv_append sq=8 parts=2", "parts"},
      {"kv_append sq=8 scale=1", "scale"},
      {"linear_decode causal", "causal"},
      {"linear_chunk rounding=nearest", "rounding"},
      {"nsa_pool sk=8 sq=8", "sq"},
      {"nsa_pool sk=8 top=4", "top"},
      {"attention sq=8 length=4", "length"},
      {"nsa_select sq=8 project", "project"},
      {"nsa_select sq=8 pass=backward", "pass"},
      {"nsa_gate sq=8 top=4", "top"},
      {"nsa_gate sq=8 descale=token", "descale"},
      {"attention sq=8 hadamard", "hadamard"},
      {"quantize sq=8 sk=8", "sk"},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.line);
    expect_error([&] { Problem::parse(row.line); }, ErrorCode::parse, row.key);
  }
  try {
    Problem::parse("combine sq=8 causal");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "causal: got an unknown key; want a key of combine");
  }
}

}  // namespace
}  // namespace tessera
