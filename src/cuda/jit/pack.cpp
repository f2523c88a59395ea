// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/pack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cuda/jit/settings.h"
#include "tessera/error.h"
#include "tessera/version.h"

#ifdef TESSERA_EMBEDDED_PACK
extern "C" {
extern const char tessera_kernel_pack_begin[];
extern const char tessera_kernel_pack_end[];
}
#endif

namespace tessera::cuda {
namespace {

constexpr char kMagic[8] = {'T', 'S', 'R', 'P', 'A', 'C', 'K', '2'};  // the last character is the version of the format

/// Little-endian, as all hosts of GPUs are. The rows, the kernels' names and the entries follow.
struct Head {
  char magic[8];
  char version[24];   // of Tessera, padded by 0
  char compiler[16];  // the newest compiler of an entry, padded by 0
  std::uint64_t rows;
  std::uint64_t name_bytes;
  Digest checksum;  // of the head with zeros here, of the rows and of the names
};
static_assert(sizeof(Head) == 96);

// Far above a real index, which has some hundred rows.
constexpr std::uint64_t kMostRows = 1U << 20U;
constexpr std::uint64_t kLargestEntry = std::uint64_t{64} << 20U;  // as for the disk cache

template <std::size_t size>
void put(char (&field)[size], const std::string& text) {
  std::memcpy(field, text.data(), std::min(text.size(), size - 1));
}

template <std::size_t size>
std::string text_of(const char (&field)[size]) {
  return {field, static_cast<std::size_t>(std::find(field, field + size, '\0') - field)};
}

Digest checksum_of(Head head, const void* rows, std::size_t row_bytes, std::string_view names) {
  head.checksum = {};
  return Sha256().add(&head, sizeof(head)).add(rows, row_bytes).add(names.data(), names.size()).digest();
}

std::pair<int, int> number_of(const std::string& compiler) {
  const std::size_t dot = compiler.find('.');
  return {std::atoi(compiler.c_str()), dot == std::string::npos ? 0 : std::atoi(compiler.c_str() + dot + 1)};
}

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : number_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  explicit operator bool() const noexcept { return number_ >= 0; }
  [[nodiscard]] int number() const noexcept { return number_; }

  [[nodiscard]] bool read(std::uint64_t offset, void* out, std::size_t bytes) const {
    auto* at = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t got = ::pread(number_, at, bytes, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += got;
      bytes -= static_cast<std::size_t>(got);
      offset += static_cast<std::uint64_t>(got);
    }
    return true;
  }

 private:
  int number_;
};

}  // namespace

void PackWriter::add(const Digest& key, const std::string& name, const std::string& architecture,
                     const Compiled& compiled) {
  entries_[key] = {name, architecture, compiled.compiler, write_entry(key, name, compiled)};
}

std::vector<char> PackWriter::bytes() const {
  std::vector<Pack::Row> rows;
  std::string names;
  std::string compiler;
  for (const auto& [key, written] : entries_) {
    Pack::Row row{};
    row.key = key;
    row.bytes = written.entry.size();
    row.name = static_cast<std::uint32_t>(names.size());
    row.name_bytes = static_cast<std::uint32_t>(written.name.size());
    put(row.architecture, written.architecture);
    names += written.name;
    rows.push_back(row);
    if (compiler.empty() || number_of(compiler) < number_of(written.compiler)) compiler = written.compiler;
  }
  const std::size_t row_bytes = rows.size() * sizeof(Pack::Row);
  std::uint64_t offset = sizeof(Head) + row_bytes + names.size();
  for (Pack::Row& row : rows) {
    row.offset = offset;
    offset += row.bytes;
  }
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
  put(head.version, version());
  put(head.compiler, compiler);
  head.rows = rows.size();
  head.name_bytes = names.size();
  head.checksum = checksum_of(head, rows.data(), row_bytes, names);
  std::vector<char> bytes;
  bytes.reserve(offset);
  const auto append = [&bytes](const void* data, std::size_t size) {
    const auto* begin = static_cast<const char*>(data);
    bytes.insert(bytes.end(), begin, begin + size);
  };
  append(&head, sizeof(head));
  append(rows.data(), row_bytes);
  append(names.data(), names.size());
  for (const auto& [key, written] : entries_) append(written.entry.data(), written.entry.size());
  return bytes;
}

/// `read(offset, out, bytes)` returns whether it succeeded.
template <class Read>
void Pack::read_index(std::uint64_t total, const std::string& argument, Read read) {
  const auto refuse = [&](std::string got) {
    throw Error(ErrorCode::parse, argument, std::move(got), "a pack that `tessera compile --pack` has written");
  };
  Head head{};
  if (total < sizeof(Head)) refuse(std::to_string(total) + " bytes");
  if (!read(0, &head, sizeof(head))) refuse("a file that cannot be read");
  if (std::memcmp(head.magic, kMagic, sizeof(kMagic) - 1) != 0) refuse("no pack");
  if (head.magic[7] != kMagic[7]) {
    refuse(std::string("a pack of format ") + head.magic[7] + " where this Tessera reads " + kMagic[7]);
  }
  const std::uint64_t behind = total - sizeof(Head);
  if (head.rows > kMostRows || head.rows * sizeof(Row) > behind) refuse("a truncated index");
  const std::uint64_t row_bytes = head.rows * sizeof(Row);
  if (head.name_bytes > behind - row_bytes) refuse("a truncated index");
  rows_.resize(head.rows);
  names_.resize(head.name_bytes);
  if (!read(sizeof(Head), rows_.data(), row_bytes) || !read(sizeof(Head) + row_bytes, names_.data(), names_.size())) {
    refuse("a file that cannot be read");
  }
  if (checksum_of(head, rows_.data(), row_bytes, names_) != head.checksum) refuse("a damaged index");
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    if (row.offset > total || row.bytes > total - row.offset || row.bytes > kLargestEntry) refuse("a truncated entry");
    if (std::uint64_t{row.name} + row.name_bytes > names_.size()) refuse("an index without names");
    if (i > 0 && !(rows_[i - 1].key < row.key)) refuse("an index out of order");
  }
  total_ = total;
  version_ = text_of(head.version);
  compiler_ = text_of(head.compiler);
}

Pack::Pack(std::span<const char> bytes, const std::string& argument) : bytes_(bytes) {
  read_index(bytes.size(), argument, [bytes](std::uint64_t offset, void* out, std::size_t size) {
    if (size > 0) std::memcpy(out, bytes.data() + offset, size);
    return true;
  });
}

namespace {

template <class Identity>
std::optional<Identity> identity_of(const Descriptor& file) {
  struct stat facts {};
  if (::fstat(file.number(), &facts) != 0 || !S_ISREG(facts.st_mode)) return std::nullopt;
  return Identity{facts.st_dev, facts.st_ino, static_cast<std::uint64_t>(facts.st_size), facts.st_mtim.tv_sec,
                  facts.st_mtim.tv_nsec};
}

}  // namespace

Pack Pack::open(const std::string& path) {
  const Descriptor file(path);
  if (!file) throw Error(ErrorCode::io, path, std::strerror(errno), "a pack of kernels that can be read");
  const auto identity = identity_of<Identity>(file);
  if (!identity) throw Error(ErrorCode::io, path, "no regular file", "a pack of kernels that can be read");
  Pack pack;
  pack.read_index(identity->size, path,
                  [&file](std::uint64_t offset, void* out, std::size_t size) { return file.read(offset, out, size); });
  pack.path_ = path;
  pack.identity_ = *identity;
  return pack;
}

std::vector<Pack::Listed> Pack::listed() const {
  std::vector<Listed> all;
  for (const Row& row : rows_) {
    all.push_back({row.key, names_.substr(row.name, row.name_bytes), text_of(row.architecture), row.bytes});
  }
  return all;
}

std::optional<Compiled> Pack::find(const Digest& key, Checksum checksum) const {
  const auto at = std::lower_bound(rows_.begin(), rows_.end(), key,
                                   [](const Row& row, const Digest& wanted) { return row.key < wanted; });
  if (at == rows_.end() || at->key != key) return std::nullopt;
  std::vector<char> held;
  std::span<const char> bytes;
  if (path_.empty()) {
    bytes = bytes_.subspan(at->offset, at->bytes);
  } else {
    const Descriptor file(path_);
    if (!file || identity_of<Identity>(file) != identity_) {
      log("the pack " + path_ + " has changed since it was opened: its kernels are not taken");
      return std::nullopt;
    }
    held.resize(at->bytes);
    if (file.read(at->offset, held.data(), held.size())) bytes = held;
  }
  auto entry = read_entry(bytes, checksum);
  if (entry && entry->key == key) return std::move(entry->compiled);
  log("the pack " + path_ + " has a damaged entry, which is not taken: " + names_.substr(at->name, at->name_bytes));
  return std::nullopt;
}

const Pack& embedded_pack() {
#ifdef TESSERA_EMBEDDED_PACK
  static const Pack pack(std::span(tessera_kernel_pack_begin, tessera_kernel_pack_end), "embedded pack");
#else
  static const Pack pack;
#endif
  return pack;
}

}  // namespace tessera::cuda
