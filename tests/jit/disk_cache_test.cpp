// SPDX-License-Identifier: Apache-2.0
// Kernels kept on disk: found again, never half written, rebuilt when damaged, shared by processes.
#include "cuda/jit/disk_cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "core/expect_error.h"
#include "cuda/jit/cache.h"
#include "fakes/fakes.h"
#include "fakes/folder.h"
#include "tessera/cuda.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;
using testing::fake_compilations;

/// With the stand-in compiler, a cache folder of its own and what is logged.
class DiskCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    set_nvrtc(testing::fake_nvrtc_path());
    set_cache_folder(folder_.path());
    set_log([this](std::string_view line) { log_ += std::string(line) + "\n"; });
    forget_compiled();
  }
  void TearDown() override {
    set_log(nullptr);
    set_cache_folder("");
    set_nvrtc("");
  }

  /// The one kernel file below the folder; fails the test when there is another number of them.
  [[nodiscard]] fs::path only_file() const {
    fs::path found;
    int count = 0;
    for (const fs::directory_entry& at : fs::recursive_directory_iterator(folder_.path())) {
      if (at.path().extension() == ".kernel") found = at.path(), ++count;
      EXPECT_NE(at.path().extension(), ".part") << at.path();
    }
    EXPECT_EQ(count, 1);
    return found;
  }

  /// Looks a kernel up as a new process would.
  static Found look_up(const KernelSource& source, const std::string& architecture = "sm_90a") {
    forget_compiled();
    return find_or_compile(source, architecture);
  }

  testing::Folder folder_;
  std::string log_;
  KernelSource source_{"a kernel", "the text of a kernel", 0};
};

TEST_F(DiskCacheTest, CompilesOnceThenFindsItOnDiskThenInTheProcess) {
  const int before = fake_compilations();
  const Found compiled = look_up(source_);
  EXPECT_EQ(compiled.origin, Origin::compiler);
  EXPECT_EQ(compiled.compiled->registers, 42);
  EXPECT_EQ(compiled.compiled->shared_bytes, 96);
  EXPECT_EQ(only_file().parent_path(), fs::path(folder_.path()) / "nvrtc-12.9" / "sm_90a");
  const Found again = look_up(source_);
  EXPECT_EQ(again.origin, Origin::disk);
  EXPECT_EQ(again.compiled->cubin, compiled.compiled->cubin);
  EXPECT_EQ(again.compiled->registers, 42);
  EXPECT_EQ(find_or_compile(source_, "sm_90a").origin, Origin::process);
  EXPECT_EQ(fake_compilations(), before + 1);
  EXPECT_NE(log_.find("a kernel"), std::string::npos) << log_;
}

TEST_F(DiskCacheTest, OtherTextsAndArchitecturesAreOtherKernels) {
  look_up(source_);
  EXPECT_EQ(look_up(source_, "sm_80").origin, Origin::compiler);
  EXPECT_EQ(look_up({"a kernel", "another text"}).origin, Origin::compiler);
  EXPECT_EQ(look_up({"another name", source_.text}).origin, Origin::disk);
}

TEST_F(DiskCacheTest, ACorruptFileIsRemovedAndBuiltAgain) {
  look_up(source_);
  const fs::path path = only_file();
  const auto size = static_cast<std::streamoff>(fs::file_size(path));
  for (const std::streamoff at : {std::streamoff{0}, size / 2, size - 1}) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
    file.close();
    log_.clear();
    EXPECT_EQ(look_up(source_).origin, Origin::compiler) << "byte " << at;
    EXPECT_NE(log_.find("corrupt"), std::string::npos) << log_;
    EXPECT_NE(log_.find(path.string()), std::string::npos) << log_;
    EXPECT_EQ(only_file(), path);
    EXPECT_EQ(look_up(source_).origin, Origin::disk);
  }
  fs::resize_file(path, static_cast<std::uintmax_t>(size / 3));
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  fs::resize_file(path, 0);
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
}

TEST_F(DiskCacheTest, AFileOfAnotherKernelIsNotTaken) {
  look_up(source_);
  const fs::path path = only_file();
  look_up({"another", "another text"});
  const DiskCache disk(folder_.path());
  const std::string other = disk.path_of(kernel_key({"another", "another text"}, "sm_90a"), "sm_90a", "12.9");
  fs::copy_file(other, path, fs::copy_options::overwrite_existing);
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
}

TEST_F(DiskCacheTest, AFolderThatCannotBeWrittenIsLoggedAndNoMore) {
  const std::string file = folder_.path() + "/file";
  std::ofstream(file) << "in the way";
  set_cache_folder(file + "/below");
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  EXPECT_NE(log_.find("cannot keep a compiled kernel"), std::string::npos) << log_;
  EXPECT_THROW(replace_file(file + "/below/name", {}), Error);
}

TEST_F(DiskCacheTest, WhetherItCanBeWrittenIsAskedWithoutATrace) {
  const fs::path folder = fs::path(folder_.path()) / "new";
  DiskCache(folder.string()).check_writable();
  EXPECT_TRUE(fs::is_empty(folder));
  fs::permissions(folder, fs::perms::others_write, fs::perm_options::add);
  expect_error([&] { DiskCache(folder.string()).check_writable(); }, ErrorCode::io, folder.string());
}

TEST_F(DiskCacheTest, WithoutAFolderNothingIsKept) {
  set_cache_folder("");
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(DiskCacheTest, AFailedCompilationIsTriedAgain) {
  const KernelSource wrong{"wrong", "#error"};
  for (int i = 0; i < 2; ++i) {
    const int before = fake_compilations();
    expect_error([&] { look_up(wrong); }, ErrorCode::internal, "kernel wrong for sm_90a");
    EXPECT_EQ(fake_compilations(), before + 1);
  }
  forget_compiled();
  try {
    find_or_compile(wrong, "sm_90a");
  } catch (const Error& error) {
    EXPECT_NE(error.got().find("error: #error directive"), std::string::npos) << error.got();
  }
}

TEST_F(DiskCacheTest, ThreadsThatWantOneKernelWaitForOneCompilation) {
  const int before = fake_compilations();
  std::vector<std::thread> threads;
  std::vector<Found> found(8);
  for (Found& one : found) threads.emplace_back([&] { one = find_or_compile(source_, "sm_90a"); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fake_compilations(), before + 1);
  for (const Found& one : found) EXPECT_EQ(one.compiled, found[0].compiled);
}

/// Two processes write and read the same entries at once; neither may see half of one.
TEST_F(DiskCacheTest, ProcessesShareAFolder) {
  constexpr int kRounds = 100;
  std::vector<pid_t> children;
  for (int child = 0; child < 2; ++child) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      bool good = true;
      const DiskCache disk(folder_.path());
      for (int round = 0; round < kRounds && good; ++round) {
        const KernelSource source{"kernel", "text " + std::to_string(round % 5)};
        const Digest key = kernel_key(source, "sm_90a");
        const Found found = look_up(source);
        disk.store(key, "sm_90a", source.name, *found.compiled);
        const auto stored = disk.find(key, "sm_90a", "12.9");
        good = stored && stored->cubin == found.compiled->cubin;
      }
      ::_exit(good && log_.find("corrupt") == std::string::npos ? 0 : 1);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = -1;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
  for (const fs::directory_entry& at : fs::recursive_directory_iterator(folder_.path())) {
    EXPECT_NE(at.path().extension(), ".part") << at.path();
  }
}

/// What a process leaves that was killed before it could rename, under every name that a counter and the process id
/// (which comes again) could have given.
TEST_F(DiskCacheTest, FilesThatAKilledProcessLeftAreInNobodysWay) {
  const DiskCache disk(folder_.path());
  const std::string path = disk.path_of(kernel_key(source_, "sm_90a"), "sm_90a", "12.9");
  fs::create_directories(fs::path(path).parent_path());
  for (int i = 0; i < 1000; ++i) {
    std::ofstream(path + "." + std::to_string(::getpid()) + "." + std::to_string(i) + ".part") << "half";
  }
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  EXPECT_EQ(look_up(source_).origin, Origin::disk);
}

TEST_F(DiskCacheTest, WhatIsNoFileOrTooLargeIsBuiltAgain) {
  look_up(source_);
  const fs::path path = only_file();
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  EXPECT_EQ(look_up(source_).origin, Origin::disk);
  fs::resize_file(path, std::uintmax_t{1} << 42);
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);
  EXPECT_EQ(look_up(source_).origin, Origin::disk);
  const fs::path compilers = fs::path(folder_.path()) / "compilers";
  const DiskCache disk(folder_.path());
  for (const bool fifo : {true, false}) {
    fs::remove(compilers);
    if (fifo) {
      ASSERT_EQ(::mkfifo(compilers.c_str(), 0600), 0);
    } else {
      std::ofstream(compilers).close();
      fs::resize_file(compilers, std::uintmax_t{1} << 42);
    }
    EXPECT_EQ(disk.compiler_of(testing::fake_nvrtc_path()), "");
    disk.remember_compiler(testing::fake_nvrtc_path(), "12.9");
    EXPECT_EQ(disk.compiler_of(testing::fake_nvrtc_path()), "12.9");
  }
}

TEST_F(DiskCacheTest, WhatAnotherUserCouldHaveWrittenIsNotTaken) {
  const DiskCache disk(folder_.path());
  look_up(source_);
  const fs::path file = only_file();
  const fs::path architecture = file.parent_path();
  const fs::path compiler = architecture.parent_path();
  EXPECT_EQ(look_up(source_).origin, Origin::disk);
  for (const fs::path& folder : {fs::path(folder_.path()), compiler, architecture}) {
    for (const fs::perms others : {fs::perms::group_write, fs::perms::others_write}) {
      fs::permissions(folder, others, fs::perm_options::add);
      log_.clear();
      EXPECT_EQ(look_up(source_).origin, Origin::compiler) << folder;
      EXPECT_NE(log_.find("cannot keep a compiled kernel: " + folder.string()), std::string::npos) << log_;
      fs::permissions(folder, others, fs::perm_options::remove);
      EXPECT_EQ(look_up(source_).origin, Origin::disk) << folder;
    }
  }
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(look_up(source_).origin, Origin::compiler);  // and replaces it
  EXPECT_EQ(look_up(source_).origin, Origin::disk);
  if (::geteuid() != 0) return;  // only root can give files away
  for (const fs::path& path : {fs::path(folder_.path()), compiler, architecture, file}) {
    ASSERT_EQ(::chown(path.c_str(), 12345, static_cast<gid_t>(-1)), 0);
    EXPECT_EQ(look_up(source_).origin, Origin::compiler) << path;
    ASSERT_EQ(::chown(path.c_str(), 0, static_cast<gid_t>(-1)), 0);
    EXPECT_EQ(look_up(source_).origin, Origin::disk) << path;
  }
}

TEST_F(DiskCacheTest, FoldersAreMadeThatNoOtherUserCanWrite) {
  const mode_t before = ::umask(0);
  set_cache_folder(folder_.path() + "/cache");
  look_up(source_);
  EXPECT_EQ(look_up(source_).origin, Origin::disk);
  ::umask(before);
}

TEST_F(DiskCacheTest, RemembersACompilersVersionUntilItsFileChanges) {
  const DiskCache disk(folder_.path());
  const std::string library = folder_.path() + "/libnvrtc.so.12";
  std::ofstream(library) << "one";
  EXPECT_EQ(disk.compiler_of(library), "");
  disk.remember_compiler(library, "12.9");
  disk.remember_compiler(testing::fake_nvrtc_path(), "13.1");
  EXPECT_EQ(disk.compiler_of(library), "12.9");
  EXPECT_EQ(disk.compiler_of(testing::fake_nvrtc_path()), "13.1");
  std::ofstream(library) << "another, longer";
  EXPECT_EQ(disk.compiler_of(library), "");
  disk.remember_compiler(library, "13.0");
  EXPECT_EQ(disk.compiler_of(library), "13.0");
}

TEST_F(DiskCacheTest, OfSeveralCompilersTheNewestIsTakenWhenAnyWillDo) {
  const DiskCache disk(folder_.path());
  const Digest key = kernel_key(source_, "sm_90a");
  for (const char* version : {"12.9", "13.0", "12.10"}) {
    Compiled compiled;
    compiled.cubin = {'x'};
    compiled.compiler = version;
    disk.store(key, "sm_90a", "kernel", compiled);
  }
  EXPECT_EQ(disk.find(key, "sm_90a", "")->compiler, "13.0");
  EXPECT_EQ(disk.find(key, "sm_90a", "12.10")->compiler, "12.10");
  EXPECT_FALSE(disk.find(key, "sm_90a", "12.8"));
  EXPECT_FALSE(disk.find(key, "sm_80", ""));
}

}  // namespace
}  // namespace tessera::cuda
