// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "cuda/jit/settings.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "nvrtc-";
constexpr const char* kCompilers = "compilers";
// Kernels have some hundred kilobytes. A larger file is not ours and is not read: a sparse file can have any size at no
// cost.
constexpr std::size_t kLargestFile = std::size_t{64} << 20;

[[noreturn]] void refuse(const std::string& path, const char* what) {
  throw Error(ErrorCode::io, path, std::string(what) + ": " + std::strerror(errno), "a file that can be written");
}

class File {
 public:
  File() = default;
  File(int folder, const char* name, int flags) : descriptor_(::openat(folder, name, flags | O_CLOEXEC, 0644)) {}
  File(const std::string& path, int flags) : File(AT_FDCWD, path.c_str(), flags) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  explicit operator bool() const noexcept { return descriptor_ >= 0; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

 private:
  int descriptor_ = -1;
};

/// Kernels run with the rights of the process, so files and folders that another user could have written are not used.
bool is_trusted(const struct stat& facts) {
  return (facts.st_uid == ::geteuid() || facts.st_uid == 0) && (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// Opens the last folder of `way`. The result is not open if one of the folders is missing or not trusted. Each folder
/// is opened relative to the one that was checked before it, so that none can be exchanged in between.
File open_folder(const std::vector<std::string>& way) {
  File folder(way.front(), O_RDONLY | O_DIRECTORY);
  for (std::size_t i = 0; folder; ++i) {
    struct stat facts {};
    if (::fstat(folder.descriptor(), &facts) != 0 || !is_trusted(facts)) return {};
    if (i + 1 == way.size()) break;
    folder = File(folder.descriptor(), way[i + 1].c_str(), O_RDONLY | O_DIRECTORY);
  }
  return folder;
}

/// Opens a file for reading. This does not block, even if the file is a FIFO without a writer.
File open_file(const File& folder, const std::string& name) {
  return {folder.descriptor(), name.c_str(), O_RDONLY | O_NONBLOCK};
}

/// nullopt if the file is not regular, larger than any of ours, not trusted, or cannot be opened.
std::optional<std::vector<char>> read(const File& file) {
  struct stat facts {};
  if (!file || ::fstat(file.descriptor(), &facts) != 0 || !S_ISREG(facts.st_mode) || !is_trusted(facts) ||
      static_cast<std::size_t>(facts.st_size) > kLargestFile) {
    return std::nullopt;
  }
  std::vector<char> bytes(static_cast<std::size_t>(facts.st_size));
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t got = ::read(file.descriptor(), bytes.data() + filled, bytes.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    filled += static_cast<std::size_t>(got);
  }
  bytes.resize(filled);
  return bytes;
}

/// Makes a folder that others may read. Throws Error{io} if the folder exists and is not trusted.
void own_folder(const std::string& path) {
  std::error_code ignored;  // if this fails, writing a file will fail and report it
  fs::create_directories(fs::path(path).parent_path(), ignored);
  ::mkdir(path.c_str(), 0755);
  struct stat facts {};
  if (::stat(path.c_str(), &facts) != 0 || is_trusted(facts)) return;
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(facts.st_mode & 07777));
  throw Error(ErrorCode::io, path, "a folder of user " + std::to_string(facts.st_uid) + " with mode " + mode,
              "one of this user or root that no other can write");
}

/// Makes a new file beside `path`. Its name is random, because a process id can occur twice: in another container, on
/// another machine, or after a process that was killed before it could rename the file.
File open_aside(const std::string& path, std::string& aside) {
  std::random_device draw;
  for (int attempt = 0; attempt < 100; ++attempt) {
    char number[24];
    std::snprintf(number, sizeof(number), ".%08x%08x", draw(), draw());
    aside = path + number + ".part";
    File file(aside, O_WRONLY | O_CREAT | O_EXCL);
    if (file || errno != EEXIST) return file;
  }
  return {};
}

bool write_all(int descriptor, std::span<const char> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return ::fsync(descriptor) == 0;
}

/// "path size seconds.nanoseconds": changes whenever the library does.
std::string identity(const std::string& library) {
  struct stat facts {};
  if (::stat(library.c_str(), &facts) != 0) return "";
  return library + " " + std::to_string(facts.st_size) + " " + std::to_string(facts.st_mtim.tv_sec) + "." +
         std::to_string(facts.st_mtim.tv_nsec);
}

std::string file_name(const Digest& key) { return to_hex(key) + ".kernel"; }

/// (13, 5) from "nvrtc-13.5".
std::pair<int, int> version_in(const std::string& folder) {
  std::pair<int, int> version{};
  const char* end = folder.data() + folder.size();
  const auto major = std::from_chars(folder.data() + kPrefix.size(), end, version.first);
  if (major.ec == std::errc() && major.ptr != end) std::from_chars(major.ptr + 1, end, version.second);
  return version;
}

}  // namespace

void replace_file(const std::string& path, std::span<const char> bytes) {
  std::error_code ignored;
  const fs::path folder = fs::path(path).parent_path();
  fs::create_directories(folder, ignored);
  std::string aside;
  {
    const File file = open_aside(path, aside);
    if (!file) refuse(aside, "cannot be made");
    if (!write_all(file.descriptor(), bytes)) {
      const int why = errno;
      ::unlink(aside.c_str());
      errno = why;
      refuse(aside, "cannot be written");
    }
  }
  if (std::rename(aside.c_str(), path.c_str()) != 0) {
    const int why = errno;
    ::unlink(aside.c_str());
    errno = why;
    refuse(path, "cannot be renamed to");
  }
  // The folder is flushed too, so that the new name survives a power cut. If this fails, the file may be lost, but it
  // is never incomplete.
  if (const File named(folder.string(), O_RDONLY | O_DIRECTORY); named) ::fsync(named.descriptor());
}

std::string DiskCache::path_of(const Digest& key, const std::string& architecture, const std::string& compiler) const {
  return folder_ + "/" + std::string(kPrefix) + compiler + "/" + architecture + "/" + file_name(key);
}

std::optional<Compiled> DiskCache::find(const Digest& key, const std::string& architecture,
                                        const std::string& compiler) const {
  if (compiler.empty()) {
    std::vector<std::string> folders;
    std::error_code error;
    for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
      const std::string name = at->path().filename().string();
      if (name.starts_with(kPrefix) && name.size() > kPrefix.size()) folders.push_back(name);
    }
    std::sort(folders.begin(), folders.end(),
              [](const std::string& a, const std::string& b) { return version_in(a) > version_in(b); });
    for (const std::string& name : folders) {
      if (auto found = find(key, architecture, name.substr(kPrefix.size()))) return found;
    }
    return std::nullopt;
  }
  const File folder = open_folder({folder_, std::string(kPrefix) + compiler, architecture});
  if (!folder) return std::nullopt;
  const File file = open_file(folder, file_name(key));
  if (!file) return std::nullopt;
  const auto bytes = read(file);
  auto entry = bytes ? read_entry(*bytes) : std::nullopt;
  if (entry && entry->key == key && entry->compiled.compiler == compiler) return std::move(entry->compiled);
  log(std::string("removing an entry of the kernel cache that is corrupt or could be another user's: ") +
      path_of(key, architecture, compiler));
  ::unlinkat(folder.descriptor(), file_name(key).c_str(), 0);
  return std::nullopt;
}

void DiskCache::store(const Digest& key, const std::string& architecture, const std::string& name,
                      const Compiled& compiled) const {
  const fs::path path = path_of(key, architecture, compiled.compiler);
  own_folder(folder_);
  own_folder(path.parent_path().parent_path());
  own_folder(path.parent_path());
  replace_file(path, write_entry(key, name, compiled));
}

void DiskCache::check_writable() const {
  own_folder(folder_);
  const std::string probe = folder_ + "/writable." + std::to_string(::getpid());
  replace_file(probe, {});
  ::unlink(probe.c_str());
}

std::optional<std::vector<char>> DiskCache::read_compilers() const {
  const File folder = open_folder({folder_});
  return folder ? read(open_file(folder, kCompilers)) : std::nullopt;
}

std::string DiskCache::compiler_of(const std::string& library) const {
  const std::string identity = cuda::identity(library);
  const auto bytes = read_compilers();
  if (identity.empty() || !bytes) return "";
  const std::string_view text(bytes->data(), bytes->size());
  const std::string line = "\n" + identity + " ";
  const std::size_t at = text.find(line);
  if (at == std::string_view::npos) return "";
  const std::size_t begin = at + line.size();
  const std::size_t end = text.find('\n', begin);
  return end == std::string_view::npos ? "" : std::string(text.substr(begin, end - begin));
}

void DiskCache::remember_compiler(const std::string& library, const std::string& version) const {
  const std::string identity = cuda::identity(library);
  if (identity.empty() || identity.find('\n') != std::string::npos) return;
  // There is one line for each library path: "\npath size time version". An older line of the same path is removed.
  std::string text;
  const auto bytes = read_compilers();
  const std::string_view old = bytes ? std::string_view(bytes->data(), bytes->size()) : std::string_view();
  for (std::size_t at = 0; at < old.size();) {
    const std::size_t end = std::min(old.find('\n', at), old.size());
    const std::string_view line = old.substr(at, end - at);
    if (!line.empty() && !line.starts_with(library + " ")) text.append("\n").append(line);
    at = end + 1;
  }
  text += "\n" + identity + " " + version + "\n";
  try {
    own_folder(folder_);
    replace_file(folder_ + "/" + kCompilers, text);
  } catch (const Error&) {
    // The only consequence is that a later look-up is slower.
  }
}

}  // namespace tessera::cuda
