// SPDX-License-Identifier: Apache-2.0
// `tessera doctor`: what it finds on machines with and without a GPU's driver and compiler, by stand-ins of them. And
// what `tessera info` says of packs.
#include <gtest/gtest.h>

#include "command/command.h"

namespace tessera {
namespace {

class Doctor : public ::testing::Test {
 protected:
  /// `variables` as in a shell, before the command.
  [[nodiscard]] testing::Outcome run(const std::string& variables, const std::string& options = "") const {
    const std::string line =
        "exec env -i PATH=/nowhere " + variables + " '" + testing::command_path().string() + "' doctor " + options;
    here.write("line.sh", line);
    return here.run_line("sh line.sh");
  }
  [[nodiscard]] std::string cache() const { return "XDG_CACHE_HOME='" + here.file("cache") + "'"; }
  static bool has(const testing::Outcome& outcome, const std::string& text) {
    return outcome.out.find(text) != std::string::npos;
  }

  testing::Workplace here;
  const std::string fakes_ = "LD_LIBRARY_PATH='" TESSERA_FAKES "'";  // a driver with a GPU, and a compiler
};

TEST_F(Doctor, MissesNothingWithDriverAndCompiler) {
  const testing::Outcome all = run(fakes_ + " " + cache(), "--gpu");
  EXPECT_EQ(all.code, 0) << all.out << all.err;
  EXPECT_TRUE(has(all, "ok       driver    for CUDA 12.9")) << all.out;
  EXPECT_TRUE(has(all, "ok       compiler  NVRTC 12.9, " TESSERA_FAKES)) << all.out;
  EXPECT_TRUE(has(all, "ok       cache     " + here.file("cache") + "/tessera")) << all.out;
  EXPECT_TRUE(has(all, "nothing is missing")) << all.out;
}

TEST_F(Doctor, SaysWhatMendsWhatIsMissing) {
  const testing::Outcome bare = run("TESSERA_NVRTC=/nowhere", "--gpu");
  EXPECT_EQ(bare.code, 1) << bare.err;
  if (!has(bare, "ok       driver")) {  // a machine with a GPU has it
    EXPECT_TRUE(has(bare, "MISSING  driver")) << bare.out;
    EXPECT_TRUE(has(bare, "mend: install NVIDIA's driver")) << bare.out;
  }
  EXPECT_TRUE(has(bare, "MISSING  compiler")) << bare.out;
  EXPECT_TRUE(has(bare, "mend: pip install ")) << bare.out;
  EXPECT_TRUE(has(bare, "MISSING  cache")) << bare.out;
  EXPECT_TRUE(has(bare, "mend: export XDG_CACHE_HOME=")) << bare.out;
  const testing::Outcome twelve = run(fakes_ + " TESSERA_NVRTC=/nowhere " + cache());
  EXPECT_EQ(twelve.code, 1);
  EXPECT_TRUE(has(twelve, "mend: pip install nvidia-cuda-nvrtc-cu12")) << twelve.out;
}

TEST_F(Doctor, ACacheThatOthersCanWriteIsMissing) {
  std::filesystem::create_directories(here.file("cache") + "/tessera");
  std::filesystem::permissions(here.file("cache") + "/tessera", std::filesystem::perms::all);
  const testing::Outcome open = run(fakes_ + " " + cache(), "--gpu");
  EXPECT_EQ(open.code, 1);
  EXPECT_TRUE(has(open, "MISSING  cache")) << open.out;
}

TEST_F(Doctor, TellsOfThePack) {
  here.write("kernel.cu", "text");
  const std::string compile = "compile --source kernel.cu --nvrtc '" TESSERA_FAKES "' ";
  ASSERT_EQ(here.run(compile + "--arch sm_90a,sm_80 --pack good.pack").code, 0);
  const auto with = [&](const std::string& pack) {
    return run(fakes_ + " " + cache() + " TESSERA_PACK='" + here.file(pack) + "'", "--gpu");
  };
  EXPECT_TRUE(has(with("good.pack"), "ok       pack      2 kernels for sm_80 sm_90a, ")) << with("good.pack").out;
  ASSERT_EQ(here.run(compile + "--arch sm_120f --pack other.pack").code, 0);
  const testing::Outcome other = with("other.pack");  // the stand-in's GPU is of sm_90
  EXPECT_EQ(other.code, 0);
  EXPECT_TRUE(has(other, "note     pack      1 kernels for sm_120f, ")) << other.out;
  EXPECT_TRUE(has(other, "none for sm_90a")) << other.out;
  here.write("bad.pack", "no pack");
  const testing::Outcome bad = with("bad.pack");
  EXPECT_EQ(bad.code, 1);
  EXPECT_TRUE(has(bad, "MISSING  pack      passed over: " + here.file("bad.pack"))) << bad.out;
}

class Pack : public ::testing::Test {
 protected:
  testing::Workplace here;
};

TEST_F(Pack, IsToldByInfo) {
  here.write("kernel.cu", "text");
  const std::string compile = "compile --source kernel.cu --arch sm_80,sm_90a --nvrtc " + std::string(TESSERA_FAKES);
  const testing::Outcome packed = here.run(compile + " --pack a.pack");
  ASSERT_EQ(packed.code, 0) << packed.err;
  EXPECT_NE(packed.out.find("a.pack: 2 kernels"), std::string::npos) << packed.out;
  const auto info_with = [&](const std::string& pack) {
    ::setenv("TESSERA_PACK", pack.c_str(), 1);
    const testing::Outcome info = here.run("info");
    ::unsetenv("TESSERA_PACK");
    EXPECT_EQ(info.code, 0) << info.err;
    return info.out;
  };
  const std::string good = info_with("a.pack");
  EXPECT_NE(good.find("kernel pack:      a.pack: 2 kernels, "), std::string::npos) << good;
  EXPECT_NE(good.find("sm_80                      1 kernels"), std::string::npos) << good;
  EXPECT_NE(good.find("kernel.cu                  2 kernels"), std::string::npos) << good;
  here.write("b.pack", here.text("a.pack").substr(0, 200));
  const std::string bad = info_with("b.pack");
  EXPECT_NE(bad.find("kernel pack:      passed over: b.pack: got a truncated"), std::string::npos) << bad;
  EXPECT_NE(info_with("none").find("kernel pack:      none\n"), std::string::npos);
  // What a new pack holds is compiled, not copied from the pack in use.
  ::setenv("TESSERA_PACK", "a.pack", 1);
  const testing::Outcome again = here.run(compile + " --cache cache --pack c.pack");
  ::unsetenv("TESSERA_PACK");
  EXPECT_NE(again.out.find("  compiler\n"), std::string::npos) << again.out;
}

}  // namespace
}  // namespace tessera
