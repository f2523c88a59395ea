// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/x86_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera::cpu {
namespace {

bool bit(unsigned value, int index) { return (value >> index & 1U) != 0; }

__attribute__((target("xsave"))) std::uint64_t extended_control_register() {
  return static_cast<std::uint64_t>(_xgetbv(0));
}

// XCR0: which register states the operating system saves.
std::uint64_t saved_states() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !bit(c, 27)) return 0;
  return extended_control_register();
}

// Linux enables the 8 KiB of tile state only on request, for all threads of the process.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool x86_has(X86Feature feature) {
  constexpr std::uint64_t kVectors = 0xE6, kTiles = 0x60000;  // SSE, AVX, three of AVX-512; configuration and data
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
  const bool tiles = bit(d, 24) && bit(d, 22);                               // AMX-TILE, AMX-BF16
  const unsigned leaves = a;
  const std::uint64_t states = saved_states();
  if (!avx512 || (states & kVectors) != kVectors) return false;
  if (feature == X86Feature::amx_bf16) return tiles && (states & kTiles) == kTiles && may_use_tiles();
  if (leaves < 1 || __get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return bit(a, 5);
}

bool x86_is_amd() {
  constexpr unsigned kAuth = 0x68747541;  // "AuthenticAMD"
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) != 0 && b == kAuth;
}

}  // namespace tessera::cpu
#endif
