// SPDX-License-Identifier: Apache-2.0
// What compiled kernels call of the emulator: the functions are in driver/, in the stand-in of libcuda. No std headers:
// every kernel is compiled with this in front.
#pragma once

namespace emulator {

using u32 = unsigned int;
using u64 = unsigned long long;

/// Where a kernel calls, for messages: a default argument takes the caller's.
struct Place {
  const char* file;
  int line;

  constexpr Place(const char* file_of_caller = __builtin_FILE(), int line_of_caller = __builtin_LINE())
      : file(file_of_caller), line(line_of_caller) {}
};

struct Index {
  unsigned x, y, z;
};
/// Of the thread that runs. A thread that goes on after a wait finds its own again.
extern Index thread_index, block_index, block_size, grid_size;

inline int lane() { return static_cast<int>(thread_index.x % 32); }

// Shared memory. Its 32-bit addresses begin behind 0, so that an address that nobody set is none.

constexpr u32 kSharedBegin = 1024;
extern char* shared_memory;  // of address kSharedBegin
extern u32 shared_bytes;     // of the launch

[[noreturn]] void refuse_shared(u32 address, u32 bytes, Place at);
/// `bytes` of shared memory, a power of 2 at which the address must be aligned.
inline char* shared(u32 address, u32 bytes, Place at = {}) {
  const u32 offset = address - kSharedBegin;
  if (address % bytes != 0 || offset >= shared_bytes || shared_bytes - offset < bytes)
    refuse_shared(address, bytes, at);
  return shared_memory + offset;
}
u32 shared_address(const void* pointer);

/// Ends the launch with an error.
[[noreturn]] void fail(const char* what, Place at = {});

// Warps. `mask`: the lanes that take part. What the others read of a lane's value are its lowest bytes.

u64 shuffle(u32 mask, u64 value, int source, Place at);
u32 ballot(u32 mask, bool predicate, Place at);
int reduce_add(u32 mask, int value, Place at);
int reduce_min(u32 mask, int value, Place at);
void warp_barrier(u32 mask, Place at);

// Barriers.

/// All threads of the block that have not ended. Returns whether any had a predicate.
bool block_barrier(bool predicate, Place at);
/// Number 1 to 15, of `threads` threads; with waits = false the thread counts and goes on.
void named_barrier(int number, int threads, bool waits, Place at);
void mbarrier_init(u32 barrier, u32 arrivals, Place at);
void mbarrier_arrive(u32 barrier, u32 expected_bytes, Place at);
void mbarrier_wait(u32 barrier, u32 parity, Place at);
bool mbarrier_test(u32 barrier, u32 parity, Place at);

// Asynchronous copies.

void cp_async(u32 to, const void* from, u32 bytes, bool valid, Place at);
void cp_async_commit();
void cp_async_wait(int pending);
void tma_load(u32 to, const void* map, u32 barrier, int column, int head, int row, int batch, Place at);
void tma_load_rows(u32 to, const void* map, u32 barrier, int panel, int eight, int page, Place at);
void tma_add(float* to, u32 from, u32 bytes, Place at);
void tma_store(float* to, u32 from, u32 bytes, Place at);
void tma_commit();
void tma_wait();

// Matrices, of 16-bit elements: bf16 or fp16.

void ldmatrix(u32 (&to)[4], u32 row_address, bool transposed, Place at);
void stmatrix(u32 row_address, const u32 (&from)[4], Place at);
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16, Place at);

void mma_m16n8k32_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at);
void mma_m16n8k32_int8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at);

/// A product of a warpgroup, begun.
struct GroupProduct {
  void* d;       // numbers of fp32; of int8 of 32 bits
  u64 a, b;      // descriptors
  u32 a_own[4];  // or A in registers
  int n;
  bool bf16, e4m3, int8, add, a_in_registers, a_transposed, b_transposed;
  Place at;
};
void wgmma(const GroupProduct& product);
void wgmma_commit(Place at);
void wgmma_wait(int later, Place at);

/// 16 bits as fp32 and back, to the nearest, ties to even.
float to_float(u32 bits, bool bf16);
u32 from_double(double value, bool bf16);

}  // namespace emulator
