// SPDX-License-Identifier: Apache-2.0
// The threads of a block as fibres of one thread of the process. A fibre runs until it waits; then another does that
// can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernel/calls.h"

namespace emulator {

using Entry = void (*)(void** parameters);

/// What a fibre waits for, for the report of a block that is stuck.
struct Wait {
  const char* what = "";
  Place at;
  std::string (*describe)(const void* object) = nullptr;
  const void* object = nullptr;
};

/// Number of the running thread in its block.
inline int thread() { return static_cast<int>(thread_index.x); }
inline int warp() { return thread() / 32; }
/// Threads of the block that have not ended.
int threads_left();
bool has_ended(int thread);

/// The running fibre stops here until wake(its number).
void suspend(const Wait& wait);
void wake(int thread);
/// Ends the launch with an error, which says which thread runs.
[[noreturn]] void fail(const std::string& what, Place at);
std::string to_string(Place at);

/// Runs one block; "" or what went wrong. `order`: 0, or a number that draws in which order fibres run.
std::string run_block(Entry entry, void** parameters, int threads, std::uint64_t order);

// What other files keep of a block, told of its beginning and ends. Ends answer "" or what went wrong.
void begin_barriers();
void thread_ends_at_barriers();
std::string end_barriers();
void begin_warps(int warps);
void begin_copies(int threads);
void thread_ends_with_copies(Place at);
void begin_products(int threads);
void thread_ends_with_products(Place at);

/// Work that every lane of the mask hands in and the last one does for all: `run` gets what each lane handed in,
/// nullptr of lanes outside the mask. Returns once it is done.
using LaneWork = void (*)(void* const (&lanes)[32], u32 mask, Place at);
void collect(const char* what, u32 mask, void* own, LaneWork run, Place at);
inline constexpr u32 kWholeWarp = 0xffffffffU;

/// Boxes that TMA was asked for and has not brought; brings one of them.
std::size_t boxes_under_way();
void bring_box(std::size_t which);

/// `bytes` that an asynchronous copy has brought count at the mbarrier.
void mbarrier_complete(u32 barrier, u32 bytes, Place at);

}  // namespace emulator
