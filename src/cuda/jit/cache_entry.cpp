// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/cache_entry.h"

#include <cstring>
#include <utility>

#include "cuda/jit/includes.h"

namespace tessera::cuda {
namespace {

constexpr char kMagic[8] = {'T', 'S', 'R', 'K', 'E', 'R', 'N', '1'};

/// Precedes the strings and the cubin. A checksum of all of these follows. Little-endian, as all hosts of GPUs are.
struct Head {
  char magic[8];
  Digest key;
  std::int32_t registers, spill_bytes, local_bytes, shared_bytes;
  std::uint64_t name, compiler, log, cubin;  // sizes in bytes; they follow the head in this order
};
static_assert(sizeof(Head) == 88);

}  // namespace

Digest kernel_key(const KernelSource& source, const std::string& architecture) {
  Sha256 hash;
  const Digest headers = embedded_includes().digest(source.text);
  hash.add_text({kMagic, sizeof(kMagic)}).add(headers.data(), headers.size()).add_text(architecture);
  for (const char* option : compile_options()) hash.add_text(option);
  return hash.add_text(source.text).digest();
}

std::vector<char> write_entry(const Digest& key, const std::string& name, const Compiled& compiled) {
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
  head.key = key;
  head.registers = compiled.registers;
  head.spill_bytes = compiled.spill_bytes;
  head.local_bytes = compiled.local_bytes;
  head.shared_bytes = compiled.shared_bytes;
  head.name = name.size();
  head.compiler = compiled.compiler.size();
  head.log = compiled.log.size();
  head.cubin = compiled.cubin.size();
  std::vector<char> bytes(sizeof(Head));
  std::memcpy(bytes.data(), &head, sizeof(Head));
  bytes.insert(bytes.end(), name.begin(), name.end());
  bytes.insert(bytes.end(), compiled.compiler.begin(), compiled.compiler.end());
  bytes.insert(bytes.end(), compiled.log.begin(), compiled.log.end());
  bytes.insert(bytes.end(), compiled.cubin.begin(), compiled.cubin.end());
  const Digest checksum = Sha256().add(bytes.data(), bytes.size()).digest();
  bytes.insert(bytes.end(), checksum.begin(), checksum.end());
  return bytes;
}

std::optional<Entry> read_entry(std::span<const char> bytes, Checksum checksum) {
  Head head{};
  if (bytes.size() < sizeof(Head) + sizeof(Digest)) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof(Head));
  if (std::memcmp(head.magic, kMagic, sizeof(kMagic)) != 0) return std::nullopt;
  std::uint64_t left = bytes.size() - sizeof(Head) - sizeof(Digest);
  for (const std::uint64_t part : {head.name, head.compiler, head.log, head.cubin}) {
    if (part > left) return std::nullopt;
    left -= part;
  }
  if (left != 0) return std::nullopt;
  if (checksum == Checksum::verify) {
    const Digest computed = Sha256().add(bytes.data(), bytes.size() - sizeof(Digest)).digest();
    if (std::memcmp(computed.data(), bytes.data() + bytes.size() - sizeof(Digest), sizeof(Digest)) != 0) {
      return std::nullopt;
    }
  }
  const char* at = bytes.data() + sizeof(Head);
  const auto take = [&at](std::uint64_t size) { return std::string(std::exchange(at, at + size), size); };
  Entry entry;
  entry.key = head.key;
  entry.name = take(head.name);
  entry.compiled.compiler = take(head.compiler);
  entry.compiled.log = take(head.log);
  entry.compiled.cubin.assign(at, at + head.cubin);
  entry.compiled.registers = head.registers;
  entry.compiled.spill_bytes = head.spill_bytes;
  entry.compiled.local_bytes = head.local_bytes;
  entry.compiled.shared_bytes = head.shared_bytes;
  return entry;
}

}  // namespace tessera::cuda
