// SPDX-License-Identifier: Apache-2.0
// Packs of kernels: every one is found, damage is told, and what is found first.
#include "cuda/jit/pack.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "core/expect_error.h"
#include "cuda/jit/cache.h"
#include "cuda/jit/settings.h"
#include "fakes/fakes.h"
#include "fakes/folder.h"
#include "tessera/cuda.h"
#include "tessera/version.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kHead = 96;
constexpr std::size_t kRow = 72;

Compiled some_compiled(std::size_t bytes, int registers) {
  Compiled compiled;
  for (std::size_t i = 0; i < bytes; ++i) compiled.cubin.push_back(static_cast<char>(i * 7));
  compiled.log = "ptxas info    : Used 40 registers";
  compiled.registers = registers;
  compiled.compiler = "12.9";
  return compiled;
}

KernelSource source_of(int i) {
  return {"family_" + std::to_string(i % 2) + " d=" + std::to_string(i), std::to_string(i)};
}
Digest key_of(int i) { return kernel_key(source_of(i), "sm_90a"); }

std::vector<char> some_pack(int kernels) {
  PackWriter writer;
  for (int i = 0; i < kernels; ++i) {
    writer.add(key_of(i), source_of(i).name, "sm_90a", some_compiled(100 + static_cast<std::size_t>(i), i));
  }
  EXPECT_EQ(writer.size(), static_cast<std::size_t>(kernels));
  return writer.bytes();
}

void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void expect_all_found(const Pack& pack, int kernels) {
  EXPECT_EQ(pack.size(), static_cast<std::size_t>(kernels));
  for (int i = 0; i < kernels; ++i) {
    const auto found = pack.find(key_of(i), Checksum::verify);
    ASSERT_TRUE(found) << i;
    EXPECT_EQ(found->registers, i);
    EXPECT_EQ(found->cubin, some_compiled(100 + static_cast<std::size_t>(i), i).cubin);
    EXPECT_EQ(found->log, "ptxas info    : Used 40 registers");
    EXPECT_EQ(found->compiler, "12.9");
  }
  EXPECT_FALSE(pack.find(key_of(kernels), Checksum::verify));
}

TEST(Pack, EveryKernelIsFoundAndNoOther) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/a.pack";
  for (const int kernels : {0, 1, 2, 50}) {
    const std::vector<char> bytes = some_pack(kernels);
    write(path, bytes);
    expect_all_found(Pack(bytes), kernels);
    const Pack file = Pack::open(path);
    expect_all_found(file, kernels);
    EXPECT_EQ(file.path(), path);
    EXPECT_EQ(file.total_bytes(), bytes.size());
  }
}

TEST(Pack, ListsWhatItHolds) {
  const std::vector<char> bytes = some_pack(7);
  const Pack pack(bytes);
  EXPECT_EQ(pack.version(), version());
  EXPECT_EQ(pack.compiler(), "12.9");
  std::set<std::string> names, wanted;
  std::uint64_t sum = kHead + 7 * kRow;
  for (const Pack::Listed& kernel : pack.listed()) {
    names.insert(kernel.name);
    EXPECT_EQ(kernel.architecture, "sm_90a");
    sum += kernel.bytes + kernel.name.size();
  }
  for (int i = 0; i < 7; ++i) wanted.insert(source_of(i).name);
  EXPECT_EQ(names, wanted);
  EXPECT_EQ(sum, bytes.size());
}

TEST(Pack, NamesTheNewestCompiler) {
  PackWriter writer;
  for (const auto& [i, compiler] : {std::pair{0, "12.9"}, std::pair{1, "12.10"}, std::pair{2, "12.8"}}) {
    Compiled compiled = some_compiled(10, i);
    compiled.compiler = compiler;
    writer.add(key_of(i), "name", "sm_80", compiled);
  }
  const std::vector<char> bytes = writer.bytes();
  EXPECT_EQ(Pack(bytes).compiler(), "12.10");
}

TEST(Pack, TheSameKernelTwiceIsThereOnce) {
  PackWriter writer;
  writer.add(key_of(0), "first", "sm_90a", some_compiled(10, 1));
  writer.add(key_of(0), "second", "sm_90a", some_compiled(10, 2));
  EXPECT_EQ(writer.size(), 1U);
}

TEST(Pack, ADamagedEntryIsNotReturned) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/a.pack";
  std::vector<char> bytes = some_pack(3);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  bytes[bytes.size() - 60] = static_cast<char>(bytes[bytes.size() - 60] ^ 1);
  write(path, bytes);
  for (const Pack& pack : {Pack(bytes), Pack::open(path)}) {
    int found = 0;
    for (int i = 0; i < 3; ++i) found += pack.find(key_of(i), Checksum::verify).has_value();
    EXPECT_EQ(found, 2);
  }
}

/// Whatever the index says, nothing behind the end is read; under a sanitizer the test would stop there.
TEST(Pack, EveryDamagedByteOfTheIndexIsFound) {
  const std::vector<char> good = some_pack(3);
  const std::size_t index = kHead + 3 * kRow + 3 * source_of(0).name.size();
  for (std::size_t at = 0; at < index; ++at) {
    std::vector<char> bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x41);
    expect_error([&] { Pack(bad, "pack"); }, ErrorCode::parse, "pack");
  }
}

TEST(Pack, EveryOtherLengthIsRefused) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/a.pack";
  const std::vector<char> good = some_pack(3);
  for (std::size_t size = 0; size < good.size(); ++size) {
    const std::vector<char> cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    expect_error([&] { Pack(cut, "pack"); }, ErrorCode::parse, "pack");
  }
  write(path, {good.begin(), good.begin() + 200});
  expect_error([&] { Pack::open(path); }, ErrorCode::parse, path);
}

TEST(Pack, OtherFilesAreRefusedByName) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/a.pack";
  expect_error([&] { Pack::open(path); }, ErrorCode::io, path);
  expect_error([&] { Pack::open(folder.path()); }, ErrorCode::io, folder.path());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);  // opening it must not wait for a writer
  expect_error([&] { Pack::open(path); }, ErrorCode::io, path);
  fs::remove(path);
  write(path, std::vector<char>(1000, 'x'));
  expect_error([&] { Pack::open(path); }, ErrorCode::parse, path);
  std::vector<char> older = some_pack(1);
  older[7] = '1';
  write(path, older);
  try {
    Pack::open(path);
    ADD_FAILURE() << "of another format";
  } catch (const Error& error) {
    EXPECT_EQ(error.got(), "a pack of format 1 where this Tessera reads 2");
  }
}

/// A process with a cache folder of its own, the stand-in compiler and no pack but those of the test.
class PackInUseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    set_nvrtc(testing::fake_nvrtc_path());
    set_cache_folder("");
    set_log([this](std::string_view line) { log_ += std::string(line) + "\n"; });
    write(path_, some_pack(3));
  }
  void TearDown() override {
    set_log(nullptr);
    set_kernel_pack("none");
    set_nvrtc("");
    forget_compiled();
  }
  static Found look_up(int i) {
    forget_compiled();
    return find_or_compile(source_of(i), "sm_90a");
  }

  testing::Folder folder_;
  std::string path_ = folder_.path() + "/a.pack";
  std::string log_;
};

TEST_F(PackInUseTest, AnswersBeforeDiskAndCompiler) {
  set_cache_folder(folder_.path() + "/cache");
  const int before = testing::fake_compilations();
  set_kernel_pack(path_);
  EXPECT_EQ(kernel_pack(), path_);
  const Found found = look_up(2);
  EXPECT_EQ(found.origin, Origin::pack);
  EXPECT_EQ(found.compiled->registers, 2);
  EXPECT_EQ(testing::fake_compilations(), before);
  EXPECT_FALSE(fs::exists(folder_.path() + "/cache"));
  EXPECT_EQ(look_up(3).origin, Origin::compiler);
  set_kernel_pack("none");
  EXPECT_EQ(kernel_pack(), "");
  EXPECT_EQ(look_up(2).origin, Origin::compiler);
  EXPECT_EQ(log_.find("pack"), std::string::npos) << log_;
}

TEST_F(PackInUseTest, TheEnvironmentNamesOne) {
  ::setenv("TESSERA_PACK", path_.c_str(), 1);
  set_kernel_pack("");
  ::unsetenv("TESSERA_PACK");
  EXPECT_EQ(kernel_pack(), path_);
  EXPECT_EQ(look_up(1).origin, Origin::pack);
}

TEST_F(PackInUseTest, OneThatCannotBeUsedIsPassedOverAndTold) {
  write(path_, std::vector<char>(500, 'x'));
  set_kernel_pack(path_);
  EXPECT_EQ(kernel_pack(), "");
  EXPECT_NE(pack_in_use().problem.find(path_ + ": got no pack"), std::string::npos) << pack_in_use().problem;
  EXPECT_EQ(look_up(1).origin, Origin::compiler);
  EXPECT_NE(log_.find("passing over the pack of kernels " + path_), std::string::npos) << log_;
  set_kernel_pack(path_ + "s");
  EXPECT_NE(pack_in_use().problem.find(path_ + "s: got No such file"), std::string::npos) << pack_in_use().problem;
}

TEST_F(PackInUseTest, AFileThatChangesIsNotReadAnyMore) {
  set_kernel_pack(path_);
  ASSERT_EQ(look_up(0).origin, Origin::pack);
  fs::resize_file(path_, 300);  // a mapped file would now end the process
  EXPECT_EQ(look_up(1).origin, Origin::compiler);
  EXPECT_NE(log_.find("has changed since it was opened"), std::string::npos) << log_;
  fs::remove(path_);
  EXPECT_EQ(look_up(2).origin, Origin::compiler);
}

TEST_F(PackInUseTest, ADamagedKernelIsCompiled) {
  std::vector<char> bytes = some_pack(3);
  for (std::size_t at = bytes.size() - 100; at < bytes.size(); ++at) bytes[at] = '\0';
  write(path_, bytes);
  set_kernel_pack(path_);
  int compiled = 0;
  for (int i = 0; i < 3; ++i) compiled += look_up(i).origin == Origin::compiler ? 1 : 0;
  EXPECT_EQ(compiled, 1);
  EXPECT_NE(log_.find("has a damaged entry, which is not taken: family_"), std::string::npos) << log_;
}

TEST(OwnFile, IsTheProgramUnderAnyName) { EXPECT_EQ(own_file(), fs::read_symlink("/proc/self/exe")); }

}  // namespace
}  // namespace tessera::cuda
