// SPDX-License-Identifier: Apache-2.0
#include "driver/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>

#include "driver/fibres.h"

namespace emulator {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMostShared = 228 * 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every type, -1 as an integer
constexpr unsigned char kGuard = 0xa5;

}  // namespace

// Kernels declare it as an extern __shared__ array, which is thread_local to g++, under a name of their choice.
extern "C" {
alignas(kPage) thread_local char memory[kMostShared + kPage];
}
}  // namespace emulator
namespace tessera::cuda {
extern thread_local char shared[] __attribute__((alias("memory")));
extern thread_local char ring_memory[] __attribute__((alias("memory")));
}  // namespace tessera::cuda
namespace emulator {

char* shared_memory = nullptr;
u32 shared_bytes = 0;

namespace {

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct Region {
  char* mapped;
  std::size_t mapped_bytes;
  std::size_t bytes, slack;  // wanted, and behind that up to the page that cannot be touched
};
std::map<char*, Region>& regions() {
  static std::map<char*, Region> all;
  return all;
}

/// "" or that the guard behind so many bytes is not what it was.
std::string written_behind(const char* begin, std::size_t bytes, std::size_t guard, const char* what) {
  for (std::size_t i = 0; i < guard; ++i) {
    if (static_cast<unsigned char>(begin[bytes + i]) == kGuard) continue;
    return "something was written " + std::to_string(i) + " bytes behind the " + std::to_string(bytes) + " of " + what;
  }
  return "";
}

}  // namespace

void begin_shared(u32 bytes) {
  shared_memory = memory;
  shared_bytes = bytes;
  const std::size_t used = whole_pages(bytes);
  std::memset(memory + bytes, kGuard, used - bytes);
  ::mprotect(memory + used, sizeof(memory) - used, PROT_NONE);
}

void poison_shared() { std::memset(shared_memory, kPoison, shared_bytes); }

std::string check_ends() {
  std::string found =
      written_behind(shared_memory, shared_bytes, whole_pages(shared_bytes) - shared_bytes, "shared memory");
  for (const auto& [begin, region] : regions()) {
    if (found.empty()) found = written_behind(begin, region.bytes, region.slack, "an allocation");
  }
  return found;
}

void end_shared() { ::mprotect(memory, sizeof(memory), PROT_READ | PROT_WRITE); }

void refuse_shared(u32 address, u32 bytes, Place at) {
  fail(std::to_string(bytes) + " bytes of shared memory at " +
           std::to_string(static_cast<int>(address - kSharedBegin)) + " of " + std::to_string(shared_bytes) +
           (address % bytes != 0 ? ", not aligned" : ""),
       at);
}

u32 shared_address(const void* pointer) {
  const auto offset = static_cast<std::uint64_t>(static_cast<const char*>(pointer) - shared_memory);
  if (offset > shared_bytes) fail("an address in shared memory is wanted of what is not there", Place{});
  return static_cast<u32>(offset) + kSharedBegin;
}

void* allocate(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;  // what a workspace wants, so that ends are near the page behind them
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t used = whole_pages(rounded);
  void* mapped =
      ::mmap(nullptr, kPage + used + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(mapped);
  ::mprotect(first, kPage, PROT_NONE);
  ::mprotect(first + kPage + used, kPage, PROT_NONE);
  char* begin = first + kPage + used - rounded;
  std::memset(first + kPage, kGuard, used - rounded);
  std::memset(begin, kPoison, bytes);
  std::memset(begin + bytes, kGuard, rounded - bytes);
  regions()[begin] = {first, kPage + used + kPage, bytes, rounded - bytes};
  return begin;
}

void release(void* begin) {
  const auto found = regions().find(static_cast<char*>(begin));
  if (found == regions().end()) return;
  ::munmap(found->second.mapped, found->second.mapped_bytes);
  regions().erase(found);
}

std::string place_of(const void* address) {
  const char* at = static_cast<const char*>(address);
  if (at >= memory && at < memory + sizeof(memory)) {
    return "byte " + std::to_string(at - shared_memory) + " of " + std::to_string(shared_bytes) + " of shared memory";
  }
  for (const auto& [begin, region] : regions()) {
    if (at < region.mapped || at >= region.mapped + region.mapped_bytes) continue;
    return "byte " + std::to_string(at - begin) + " of " + std::to_string(region.bytes) + " of an allocation";
  }
  return "in no allocation";
}

}  // namespace emulator
