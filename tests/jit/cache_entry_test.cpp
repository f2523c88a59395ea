// SPDX-License-Identifier: Apache-2.0
// A compiled kernel as bytes, and its key.
#include "cuda/jit/cache_entry.h"

#include <gtest/gtest.h>

namespace tessera::cuda {
namespace {

Compiled some_compiled(std::size_t bytes = 300) {
  Compiled compiled;
  for (std::size_t i = 0; i < bytes; ++i) compiled.cubin.push_back(static_cast<char>(i * 7));
  compiled.log = "ptxas info    : Used 40 registers";
  compiled.registers = 40;
  compiled.spill_bytes = 8;
  compiled.local_bytes = 16;
  compiled.shared_bytes = 96;
  compiled.compiler = "12.9";
  return compiled;
}

void expect_same(const Compiled& a, const Compiled& b) {
  EXPECT_EQ(a.cubin, b.cubin);
  EXPECT_EQ(a.log, b.log);
  EXPECT_EQ(a.registers, b.registers);
  EXPECT_EQ(a.spill_bytes, b.spill_bytes);
  EXPECT_EQ(a.local_bytes, b.local_bytes);
  EXPECT_EQ(a.shared_bytes, b.shared_bytes);
  EXPECT_EQ(a.compiler, b.compiler);
}

Digest key_of(const char* text) { return kernel_key({"name", text}, "sm_90a"); }

TEST(Sha256, AgreesWithTheStandard) {
  EXPECT_EQ(to_hex(Sha256().digest()), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(to_hex(Sha256().add("abc", 3).digest()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string million(1000000, 'a');
  EXPECT_EQ(to_hex(Sha256().add(million.data(), million.size()).digest()),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  Sha256 pieces;
  for (std::size_t at = 0, size = 1; at < million.size(); at += size, size = size % 200 + 1) {
    pieces.add(million.data() + at, std::min(size, million.size() - at));
  }
  EXPECT_EQ(to_hex(pieces.digest()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(KernelKey, DependsOnTextAndArchitectureAlone) {
  EXPECT_EQ(kernel_key({"one", "text", 0}, "sm_90a"), kernel_key({"two", "text", 4096}, "sm_90a"));
  EXPECT_NE(kernel_key({"one", "text"}, "sm_90a"), kernel_key({"one", "text "}, "sm_90a"));
  EXPECT_NE(kernel_key({"one", "text"}, "sm_90a"), kernel_key({"one", "text"}, "sm_80"));
}

TEST(Entry, ComesBackAsItWasWritten) {
  const Compiled compiled = some_compiled();
  const std::vector<char> bytes = write_entry(key_of("a"), "a kernel", compiled);
  const auto entry = read_entry(bytes);
  ASSERT_TRUE(entry);
  EXPECT_EQ(entry->key, key_of("a"));
  EXPECT_EQ(entry->name, "a kernel");
  expect_same(entry->compiled, compiled);
}

TEST(Entry, EveryDamagedByteIsFound) {
  const std::vector<char> good = write_entry(key_of("a"), "a kernel", some_compiled(40));
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::vector<char> bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    EXPECT_FALSE(read_entry(bad)) << "byte " << at;
  }
}

TEST(Entry, EveryOtherLengthIsRefused) {
  const std::vector<char> good = write_entry(key_of("a"), "a kernel", some_compiled(40));
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(read_entry(std::span(good).first(size))) << size << " bytes";
    EXPECT_FALSE(read_entry(std::span(good).first(size), Checksum::skip)) << size << " bytes";
  }
  std::vector<char> longer = good;
  longer.push_back('\0');
  EXPECT_FALSE(read_entry(longer, Checksum::skip));
}

TEST(Entry, LengthsThatOverflowAreRefused) {
  std::vector<char> bytes = write_entry(key_of("a"), "a kernel", some_compiled(40));
  for (std::size_t at = 56; at < 88; ++at) bytes[at] = '\xff';  // the four lengths
  EXPECT_FALSE(read_entry(bytes, Checksum::skip));
}

}  // namespace
}  // namespace tessera::cuda
