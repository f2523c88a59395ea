// SPDX-License-Identifier: Apache-2.0
// `tessera random` on a GPU that is none (tests/fakes): its launches do nothing, so every problem fails.
#include <gtest/gtest.h>

#include <cstdlib>

#include "command/command.h"

namespace tessera::testing {
namespace {

class RandomOnFakeGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(command_path())) GTEST_SKIP() << "no " << command_path() << " in this build";
    ::setenv("LD_LIBRARY_PATH", TESSERA_FAKES, 1);
    ::setenv("TESSERA_NVRTC", TESSERA_FAKES "/libnvrtc.so.12", 1);
    ::setenv("XDG_CACHE_HOME", here.file("cache").c_str(), 1);
  }
  void TearDown() override {
    for (const char* name : {"LD_LIBRARY_PATH", "TESSERA_NVRTC", "XDG_CACHE_HOME"}) ::unsetenv(name);
  }
  Workplace here;
};

// Of this sequence GPUs have nothing for the first gradients, more than are wanted.
TEST_F(RandomOnFakeGpu, ProblemsThatNoKernelTakesDoNotCount) {
  const Outcome outcome = here.run("random --device cuda --match 'attention pass=backward' --count 3 --seed 9");
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  const std::size_t skipped = outcome.out.find(" skipped; seed 9: 3 problems in ");
  ASSERT_NE(skipped, std::string::npos) << outcome.out;
  EXPECT_GT(std::stoi(outcome.out.substr(outcome.out.rfind('\n', skipped) + 1)), 2 * 3) << outcome.out;
}

TEST_F(RandomOnFakeGpu, NoProblemAtAllIsAFailure) {
  const Outcome outcome = here.run("random --device cuda --implementation cuda.none --count 3");
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_NE(outcome.out.find("FAIL none of "), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace tessera::testing
