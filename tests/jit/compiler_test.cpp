// SPDX-License-Identifier: Apache-2.0
// What is asked of NVRTC and read from its log, and what is said when it, or the driver, is not there.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "core/expect_error.h"
#include "cuda/driver/driver.h"
#include "cuda/jit/compile.h"
#include "cuda/jit/headers.h"
#include "cuda/jit/nvrtc.h"
#include "fakes/fakes.h"
#include "fakes/folder.h"
#include "tessera/cuda.h"
#include "tessera/plan.h"

namespace tessera::cuda {
namespace {

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

/// Sets a variable of the environment while it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* old = ::getenv(name)) old_ = old, had_ = true;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { had_ ? ::setenv(name_, old_.c_str(), 1) : ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

TEST(Architectures, FollowTheComputeCapability) {
  EXPECT_EQ(architecture(80), "sm_80");
  EXPECT_EQ(architecture(86), "sm_86");
  EXPECT_EQ(architecture(89), "sm_89");
  EXPECT_EQ(architecture(90), "sm_90a");
  EXPECT_EQ(architecture(100), "sm_100f");
  EXPECT_EQ(architecture(103), "sm_100f");
  EXPECT_EQ(architecture(120), "sm_120f");
  EXPECT_EQ(architecture(121), "sm_120f");
  for (const int sm : {80, 89, 90, 100, 120}) EXPECT_EQ(compute_capability(architecture(sm)), sm);
  for (const char* wrong : {"", "sm_", "80", "sm_75", "sm_90b", "sm_90aa", "compute_90", "sm_1000"}) {
    expect_error([&] { compute_capability(wrong); }, ErrorCode::invalid_argument, "arch");
  }
}

TEST(CompilerLog, TellsResources) {
  Compiled compiled;
  compiled.log =
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'tessera_kernel' for 'sm_90a'\n"
      "ptxas info    : Function properties for tessera_kernel\n"
      "    32 bytes stack frame, 100 bytes spill stores, 104 bytes spill loads\n"
      "ptxas         .     24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1040 bytes smem\n"
      "kernel(3): warning #177-D: variable \"x\" was declared but never referenced\n";
  read_resources(compiled);
  EXPECT_EQ(compiled.registers, 255);
  EXPECT_EQ(compiled.shared_bytes, 1040);
  EXPECT_EQ(compiled.local_bytes, 24);
  EXPECT_EQ(compiled.spill_bytes, 24);
  bool warned = false;
  for (const std::string& line : warnings(compiled.log)) warned = warned || contains(line, "warning #177-D");
  EXPECT_TRUE(warned);
}

TEST(CompilerLog, TellsOfLosses) {
  const std::string account = "ptxas info    : Used 168 registers, used 8 barriers\n";
  const std::string loss =
      "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non "
      "wgmma instructions reading accumulator registers of a wgmma in the function 'tessera_kernel'";
  EXPECT_FALSE(loses_speed(account));
  EXPECT_TRUE(warnings(account).empty());
  EXPECT_TRUE(loses_speed(account + loss + "\n"));
  EXPECT_EQ(warnings(account + loss + "\n"), std::vector<std::string>{loss});
}

TEST(Compile, PassesArchitectureAndOptionsOn) {
  set_nvrtc(testing::fake_nvrtc_path());
  const Compiled compiled = compile({"name", "the text"}, "sm_100f");
  set_nvrtc("");
  const std::string cubin(compiled.cubin.begin(), compiled.cubin.end());
  EXPECT_TRUE(contains(cubin, "the text")) << cubin;
  EXPECT_TRUE(contains(cubin, "--gpu-architecture=sm_100f\n")) << cubin;
  for (const char* option : compile_options()) EXPECT_TRUE(contains(cubin, option)) << option;
  EXPECT_EQ(compiled.compiler, "12.9");
  EXPECT_EQ(compiled.registers, 42);
  EXPECT_EQ(compiled.spill_bytes, 0);
}

TEST(Compile, ACompilerWithoutFamiliesIsAskedForThePlainArchitecture) {
  testing::set_fake_nvrtc_minor_version(8);
  set_nvrtc(testing::fake_nvrtc_path());
  for (const auto& [asked, target] : {std::pair{"sm_80", "sm_80\n"}, std::pair{"sm_90a", "sm_90a\n"},
                                      std::pair{"sm_100f", "sm_100\n"}, std::pair{"sm_120f", "sm_120\n"}}) {
    const Compiled compiled = compile({"name", "the text"}, asked);
    const std::string cubin(compiled.cubin.begin(), compiled.cubin.end());
    EXPECT_TRUE(contains(cubin, std::string("--gpu-architecture=") + target)) << asked << "\n" << cubin;
    EXPECT_EQ(compiled.compiler, "12.8");
  }
  testing::set_fake_nvrtc_minor_version(9);
  set_nvrtc("");
}

TEST(Compile, CountsSpills) {
  set_nvrtc(testing::fake_nvrtc_path());
  const Compiled compiled = compile({"name", "#pragma spill"}, "sm_80");
  set_nvrtc("");
  EXPECT_EQ(compiled.spill_bytes, 24);
  EXPECT_EQ(compiled.local_bytes, 24);
}

TEST(Nvrtc, ANamedFileOrFolderIsTakenAndNothingElse) {
  const testing::Folder folder;
  for (const std::string& named : {testing::fake_nvrtc_path(), std::string(TESSERA_FAKES)}) {
    set_nvrtc(named);
    const Compiler found = compiler();
    EXPECT_EQ(std::filesystem::weakly_canonical(found.path),
              std::filesystem::weakly_canonical(testing::fake_nvrtc_path()));
    EXPECT_EQ(found.major, 12);
    EXPECT_EQ(found.minor, 9);
  }
  // A setting that holds nothing is an error even where TESSERA_NVRTC would lead to one.
  const Variable variable("TESSERA_NVRTC", testing::fake_nvrtc_path());
  set_nvrtc(folder.path());
  try {
    compiler();
    ADD_FAILURE() << "found in an empty folder";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "nvrtc");
    EXPECT_TRUE(contains(error.got(), folder.path())) << error.got();
    EXPECT_TRUE(contains(error.got(), folder.path() + "/lib64")) << error.got();
    EXPECT_TRUE(contains(error.want(), "12.8")) << error.want();
    EXPECT_TRUE(contains(error.want(), "nvidia-cuda-nvrtc")) << error.want();
    EXPECT_TRUE(contains(error.want(), "TESSERA_NVRTC")) << error.want();
  }
  set_nvrtc("");
  EXPECT_EQ(compiler().major, 12);  // by TESSERA_NVRTC
}

TEST(Nvrtc, AFileThatIsNoLibraryIsNamedWithTheReason) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/libnvrtc.so.12";
  std::ofstream(path) << "not a library";
  set_nvrtc(path);
  try {
    compiler();
    ADD_FAILURE() << "opened a text file";
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.got(), path)) << error.got();
    EXPECT_TRUE(contains(error.got(), "file too short") || contains(error.got(), "invalid ELF")) << error.got();
  }
  set_nvrtc("");
}

TEST(Nvrtc, TheSearchListsEveryPlace) {
  const testing::Folder folder;
  std::filesystem::create_directories(folder.path() + "/venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
  std::filesystem::create_directories(folder.path() + "/loader");
  std::filesystem::create_directories(folder.path() + "/toolkit/lib64");
  const Variable set("TESSERA_NVRTC", "");
  const Variable loader("LD_LIBRARY_PATH", folder.path() + "/loader");
  const Variable toolkit("CUDA_HOME", folder.path() + "/toolkit");
  const Variable environment("VIRTUAL_ENV", folder.path() + "/venv");
  set_nvrtc("");
  const NvrtcFiles none = nvrtc_files();
  EXPECT_FALSE(none.named);
  std::string places;
  for (const std::string& place : none.sought) places += place + "\n";
  for (const std::string& place :
       {std::string("TESSERA_NVRTC (not set)"), folder.path() + "/loader", std::string("/usr/lib/x86_64-linux-gnu"),
        folder.path() + "/toolkit/lib64", std::string("/usr/local/cuda/lib64"),
        folder.path() + "/venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib"}) {
    EXPECT_TRUE(contains(places, place)) << place << " is not among\n" << places;
  }
  // What is put there is found, in the order of the places.
  const std::string package = folder.path() + "/venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
  const std::string in_toolkit = folder.path() + "/toolkit/lib64/libnvrtc.so.13";
  std::ofstream(package) << "x";
  std::ofstream(in_toolkit) << "x";
  const NvrtcFiles some = nvrtc_files();
  const auto position = [&](const std::string& path) {
    std::size_t at = 0;
    while (at < some.files.size() && some.files[at].path != path) ++at;
    return at;
  };
  ASSERT_LT(position(in_toolkit), some.files.size());
  ASSERT_LT(position(package), some.files.size());
  EXPECT_LT(position(in_toolkit), position(package));
  EXPECT_EQ(some.files[position(in_toolkit)].where, "CUDA toolkit");
  EXPECT_EQ(some.files[position(package)].where, "pip package");
}

TEST(DriverSearch, WithoutOneTheErrorNamesWhatIsMissing) {
  if (find_driver() != nullptr) GTEST_SKIP() << "this machine has a driver";
  for (const auto& call :
       {+[] { driver(); }, +[] { driver_version(); }, +[] { devices(); }, +[] { Target::cuda_device(0); }}) {
    try {
      call();
      ADD_FAILURE() << "no driver, and no error";
    } catch (const Error& error) {
      EXPECT_EQ(to_string(error.code()), to_string(ErrorCode::unsupported));
      EXPECT_EQ(error.argument(), "cuda");
      EXPECT_TRUE(contains(error.got(), "libcuda")) << error.got();
      EXPECT_TRUE(contains(error.want(), "libcuda.so.1")) << error.want();
    }
  }
  EXPECT_EQ(driver_version_or_zero(), 0);
}

TEST(EmbeddedHeaders, AreThoseOfTheSourceTree) {
  const HeaderFiles files(std::string(TESSERA_SOURCE_DIR) + "/src");
  const std::span<const Header> embedded = embedded_headers();
  ASSERT_EQ(files.headers.size(), embedded.size());
  for (std::size_t i = 0; i < embedded.size(); ++i) {
    EXPECT_STREQ(files.headers[i].name, embedded[i].name);
    EXPECT_STREQ(files.headers[i].text, embedded[i].text);
  }
  expect_error([] { HeaderFiles("/nowhere"); }, ErrorCode::io, "/nowhere");
}

}  // namespace
}  // namespace tessera::cuda
