// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cuda/jit/settings.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "nvrtc-";

[[noreturn]] void refuse(const std::string& path, const char* what) {
  throw Error(ErrorCode::io, path, std::string(what) + ": " + std::strerror(errno), "a file that can be written");
}

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  explicit operator bool() const noexcept { return descriptor_ >= 0; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

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
  static std::atomic<unsigned> counter{0};
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  fs::create_directories(folder, error);
  const std::string aside = path + "." + std::to_string(::getpid()) + "." + std::to_string(counter++) + ".part";
  {
    const File file(aside, O_WRONLY | O_CREAT | O_EXCL);
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
  // The new name too is to survive a power cut; where a folder cannot be flushed, it may be lost, not torn.
  if (const File named(folder.string(), O_RDONLY | O_DIRECTORY); named) ::fsync(named.descriptor());
}

std::optional<std::vector<char>> read_file(const std::string& path) {
  const File file(path, O_RDONLY);
  struct stat facts {};
  if (!file || ::fstat(file.descriptor(), &facts) != 0 || !S_ISREG(facts.st_mode)) return std::nullopt;
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

std::string DiskCache::path_of(const Digest& key, const std::string& architecture, const std::string& compiler) const {
  return folder_ + "/" + std::string(kPrefix) + compiler + "/" + architecture + "/" + to_hex(key) + ".kernel";
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
  const std::string path = path_of(key, architecture, compiler);
  const auto bytes = read_file(path);
  if (!bytes) return std::nullopt;
  auto entry = read_entry(*bytes);
  if (entry && entry->key == key && entry->compiled.compiler == compiler) return std::move(entry->compiled);
  log("removing a corrupt entry of the kernel cache: " + path);
  ::unlink(path.c_str());
  return std::nullopt;
}

void DiskCache::store(const Digest& key, const std::string& architecture, const std::string& name,
                      const Compiled& compiled) const {
  replace_file(path_of(key, architecture, compiled.compiler), write_entry(key, name, compiled));
}

std::string DiskCache::compiler_of(const std::string& library) const {
  const std::string identity = cuda::identity(library);
  const auto bytes = read_file(folder_ + "/compilers");
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
  // One line a library path: "\npath size time version"; an older one of the same path goes.
  std::string text;
  const auto bytes = read_file(folder_ + "/compilers");
  const std::string_view old = bytes ? std::string_view(bytes->data(), bytes->size()) : std::string_view();
  for (std::size_t at = 0; at < old.size();) {
    const std::size_t end = std::min(old.find('\n', at), old.size());
    const std::string_view line = old.substr(at, end - at);
    if (!line.empty() && !line.starts_with(library + " ")) text.append("\n").append(line);
    at = end + 1;
  }
  text += "\n" + identity + " " + version + "\n";
  try {
    replace_file(folder_ + "/compilers", text);
  } catch (const Error&) {
    // Only a later look-up's time depends on it.
  }
}

}  // namespace tessera::cuda
