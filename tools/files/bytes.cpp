// SPDX-License-Identifier: Apache-2.0
#include "files/bytes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/error.h"

namespace tessera::files {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& doing, const char* want) {
  throw Error(ErrorCode::io, path, doing + ": " + std::strerror(errno), want);
}

// Closes on every way out.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const noexcept { return number_; }
  int close() noexcept { return ::close(std::exchange(number_, -1)); }

 private:
  int number_;
};

bool write_all(int descriptor, std::span<const std::byte> part) {
  constexpr std::size_t kMost = std::size_t{1} << 30U;  // Linux writes at most 2 GiB a call
  while (!part.empty()) {
    const ssize_t written = ::write(descriptor, part.data(), std::min(part.size(), kMost));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    part = part.subspan(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) fail(path, "open", "a file that can be read");
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail(path, "stat", "a file that can be read");
  if (!S_ISREG(status.st_mode)) throw Error(ErrorCode::io, path, "not a regular file", "a file that can be read");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // an empty map is an error of mmap
  void* map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (map == MAP_FAILED) fail(path, "mmap", "a file that can be mapped");
  data_ = static_cast<const std::byte*>(map);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void write_atomically(const std::string& path, const std::vector<std::span<const std::byte>>& parts) {
  constexpr const char* kWant = "a path that can be written";
  std::string temporary = path + ".XXXXXX";
  Descriptor file(::mkstemp(temporary.data()));
  if (file.get() < 0) fail(path, "create", kWant);
  bool ok = true;
  for (const auto& part : parts) ok = ok && write_all(file.get(), part);
  const mode_t mask = ::umask(0);  // mkstemp makes files that only the owner reads
  ::umask(mask);
  ok = ok && ::fchmod(file.get(), 0666 & ~mask) == 0 && ::fsync(file.get()) == 0;
  ok = file.close() == 0 && ok;
  ok = ok && ::rename(temporary.c_str(), path.c_str()) == 0;
  if (!ok) {
    const int reason = errno;
    ::unlink(temporary.c_str());
    errno = reason;
    fail(path, "write", kWant);
  }
}

void write_atomically(const std::string& path, const std::string& text) {
  write_atomically(path, {std::as_bytes(std::span(text.data(), text.size()))});
}

}  // namespace tessera::files
