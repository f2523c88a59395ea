// SPDX-License-Identifier: Apache-2.0
// What plans of native sparse attention refuse.
#include <gtest/gtest.h>

#include "tessera/error.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

std::string refusal_of_select(const std::string& line, int sm) {
  try {
    make_plan(Problem::parse("nsa_select sq=4096 dtype=bf16 length=32 stride=16 block=64 score=softmax causal " + line),
              Target::cuda(sm), Wishes::parse("implementation=cuda.nsa_select"));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Each head of a list has a row of scores in shared memory, or the kernel would write past it.
TEST(NsaSelect, WantsARowForEachHead) {
  const char* const reason = "has shared memory for scores of 16 rows; want one for each of";
  for (const int sm : {89, 120}) {
    EXPECT_NE(refusal_of_select("hq=64 hkv=1 d=256 top=16", sm).find(reason), std::string::npos) << sm;
  }
  EXPECT_NE(refusal_of_select("hq=64 hkv=1 d=512 top=16", 80).find(reason), std::string::npos);
  EXPECT_NE(refusal_of_select("hq=64 hkv=1 d=128 top=32 tile=352 reduce=max", 90).find(reason), std::string::npos);
  for (const int sm : {80, 89, 90, 120}) EXPECT_EQ(refusal_of_select("hq=64 hkv=4 d=128 top=16", sm), "") << sm;
}

// Scores of compressed keys are followed in one pass over them, which several rows of a tile would take by turns.
TEST(NsaSelect, HasNoListsOfKeysByTheLargestProbability) {
  const char* const reason = "has no lists of compressed keys by the largest probability of all rows of a tile";
  EXPECT_NE(refusal_of_select("hq=8 hkv=2 d=128 top=16 compressed_top=4 tile=4 reduce=max", 90).find(reason),
            std::string::npos);
  EXPECT_EQ(refusal_of_select("hq=8 hkv=2 d=128 top=16 compressed_top=4 tile=4 reduce=mean", 90), "");
}

}  // namespace
}  // namespace tessera
