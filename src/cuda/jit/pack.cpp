// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/pack.h"

#include <cstring>

#include "tessera/error.h"

#ifdef TESSERA_EMBEDDED_PACK
extern "C" {
extern const char tessera_kernel_pack_begin[];
extern const char tessera_kernel_pack_end[];
}
#endif

namespace tessera::cuda {
namespace {

constexpr char kMagic[8] = {'T', 'S', 'R', 'P', 'A', 'C', 'K', '1'};

struct Head {
  char magic[8];
  std::uint64_t count;
};
struct IndexRow {
  Digest key;
  std::uint64_t offset;  // from the begin of the pack
  std::uint64_t bytes;
};
static_assert(sizeof(IndexRow) == 48);

IndexRow row_at(std::span<const char> pack, std::size_t index) {
  IndexRow row{};
  std::memcpy(&row, pack.data() + sizeof(Head) + index * sizeof(IndexRow), sizeof(row));
  return row;
}

}  // namespace

void PackWriter::add(const Digest& key, const std::string& name, const Compiled& compiled) {
  entries_[key] = write_entry(key, name, compiled);
}

std::vector<char> PackWriter::bytes() const {
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
  head.count = entries_.size();
  std::vector<char> bytes(sizeof(Head) + entries_.size() * sizeof(IndexRow));
  std::memcpy(bytes.data(), &head, sizeof(head));
  std::size_t index = 0;
  for (const auto& [key, entry] : entries_) {
    const IndexRow row{key, bytes.size(), entry.size()};
    std::memcpy(bytes.data() + sizeof(Head) + index++ * sizeof(IndexRow), &row, sizeof(row));
    bytes.insert(bytes.end(), entry.begin(), entry.end());
  }
  return bytes;
}

Pack::Pack(std::span<const char> bytes, std::string_view argument) : bytes_(bytes) {
  const auto refuse = [&](std::string got) {
    throw Error(ErrorCode::parse, std::string(argument), std::move(got), "what `tessera compile --pack` writes");
  };
  Head head{};
  if (bytes.size() < sizeof(Head)) refuse(std::to_string(bytes.size()) + " bytes");
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (std::memcmp(head.magic, kMagic, sizeof(kMagic)) != 0) refuse("another format");
  if (head.count > (bytes.size() - sizeof(Head)) / sizeof(IndexRow)) refuse("a truncated index");
  count_ = head.count;
  for (std::size_t i = 0; i < count_; ++i) {
    const IndexRow row = row_at(bytes_, i);
    if (row.offset > bytes.size() || row.bytes > bytes.size() - row.offset) refuse("a truncated entry");
    if (i > 0 && !(key_of(i - 1) < row.key)) refuse("an index out of order");
  }
}

Digest Pack::key_of(std::size_t index) const { return row_at(bytes_, index).key; }

std::span<const char> Pack::bytes_of(std::size_t index) const {
  const IndexRow row = row_at(bytes_, index);
  return bytes_.subspan(row.offset, row.bytes);
}

std::optional<Entry> Pack::entry(std::size_t index) const { return read_entry(bytes_of(index)); }

std::optional<Compiled> Pack::find(const Digest& key, Checksum checksum) const {
  std::size_t low = 0;
  std::size_t high = count_;
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if (key_of(middle) < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == count_ || key_of(low) != key) return std::nullopt;
  auto entry = read_entry(bytes_of(low), checksum);
  if (!entry || entry->key != key) return std::nullopt;
  return std::move(entry->compiled);
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
