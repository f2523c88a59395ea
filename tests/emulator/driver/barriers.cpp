// SPDX-License-Identifier: Apache-2.0
// Barriers of a block, of some of its warps, and mbarriers.
#include <array>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "driver/fibres.h"

namespace emulator {
namespace {

struct Barrier {
  int expected = 0, arrived = 0;
  bool any = false, result = false;
  Place first;  // of this round's arrivals
  std::vector<int> waiting;
};

struct MBarrier {
  int expected = 0, pending = 0;  // arrivals
  std::int64_t bytes = 0;         // expected and not there yet
  u32 phase = 0;
  std::vector<int> waiting;
};

std::array<Barrier, 16> barriers;  // the first is the block's
std::unordered_map<u32, MBarrier> mbarriers;

// Stands where an mbarrier is: whoever overwrites it is found at its next use.
constexpr char kMark[] = "mbarrie";
static_assert(sizeof(kMark) == 8);

void wake_all(std::vector<int>& waiting) {
  for (const int thread : waiting) wake(thread);
  waiting.clear();
}

void complete(Barrier& barrier) {
  barrier.result = barrier.any;
  barrier.any = false;
  barrier.arrived = 0;
  wake_all(barrier.waiting);
}

std::string describe_barrier(const void* object) {
  const auto& barrier = *static_cast<const Barrier*>(object);
  const auto number = &barrier - barriers.data();
  const int expected = number == 0 ? threads_left() : barrier.expected;
  return "barrier " + std::to_string(number) + ", " + std::to_string(barrier.arrived) + " of " +
         std::to_string(expected) + " threads";
}

std::string describe_mbarrier(const void* object) {
  const auto& barrier = *static_cast<const MBarrier*>(object);
  u32 address = 0;
  for (const auto& [at, each] : mbarriers) {
    if (&each == &barrier) address = at;
  }
  return "mbarrier at " + std::to_string(address - kSharedBegin) + ", phase " + std::to_string(barrier.phase) + ", " +
         std::to_string(barrier.expected - barrier.pending) + " of " + std::to_string(barrier.expected) +
         " arrivals, " + std::to_string(barrier.bytes) + " bytes missing";
}

MBarrier& find(u32 address, Place at) {
  const char* mark = shared(address, 8, at);
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("no mbarrier was initialised here", at);
  if (std::memcmp(mark, kMark, sizeof(kMark)) != 0) fail("the mbarrier was overwritten", at);
  return found->second;
}

void end_phase(MBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  wake_all(barrier.waiting);
}

}  // namespace

void begin_barriers() {
  barriers = {};
  mbarriers.clear();
}

void thread_ends_at_barriers() {
  Barrier& block = barriers[0];
  if (block.arrived > 0 && block.arrived == threads_left()) complete(block);
}

std::string end_barriers() {
  for (const auto& [address, barrier] : mbarriers) {
    if (barrier.bytes != 0) return "the block ends while copies are under way: " + describe_mbarrier(&barrier);
  }
  return "";
}

bool block_barrier(bool predicate, Place at) {
  Barrier& barrier = barriers[0];
  barrier.any = barrier.any || predicate;
  if (++barrier.arrived == threads_left()) {
    complete(barrier);
  } else {
    barrier.waiting.push_back(thread());
    suspend({"for the block", at, describe_barrier, &barrier});
  }
  return barrier.result;
}

void named_barrier(int number, int threads, bool waits, Place at) {
  if (number < 0 || number > 15) fail("barrier " + std::to_string(number) + "; want 0 to 15", at);
  if (threads <= 0 || threads % 32 != 0 || static_cast<unsigned>(threads) > block_size.x) {
    fail("a barrier of " + std::to_string(threads) + " of the block's " + std::to_string(block_size.x) + " threads",
         at);
  }
  Barrier& barrier = barriers[static_cast<std::size_t>(number)];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.first = at;
  } else if (barrier.expected != threads) {
    fail("barrier " + std::to_string(number) + " of " + std::to_string(threads) + " threads is one of " +
             std::to_string(barrier.expected) + " at " + to_string(barrier.first),
         at);
  }
  if (++barrier.arrived == threads) {
    complete(barrier);
  } else if (waits) {
    barrier.waiting.push_back(thread());
    suspend({"for warps", at, describe_barrier, &barrier});
  }
}

void mbarrier_init(u32 barrier, u32 arrivals, Place at) {
  std::memcpy(shared(barrier, 8, at), kMark, sizeof(kMark));
  MBarrier& made = mbarriers[barrier];
  if (!made.waiting.empty()) fail("threads wait at the mbarrier that is initialised", at);
  made = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0, {}};
}

void mbarrier_arrive(u32 barrier, u32 expected_bytes, Place at) {
  MBarrier& found = find(barrier, at);
  if (found.pending == 0) fail("one arrival too many: " + describe_mbarrier(&found), at);
  found.bytes += expected_bytes;
  --found.pending;
  end_phase(found);
}

void mbarrier_complete(u32 barrier, u32 bytes, Place at) {
  MBarrier& found = find(barrier, at);
  found.bytes -= bytes;
  end_phase(found);
}

bool mbarrier_test(u32 barrier, u32 parity, Place at) { return (find(barrier, at).phase & 1) != parity; }

void mbarrier_wait(u32 barrier, u32 parity, Place at) {
  MBarrier& found = find(barrier, at);
  while ((found.phase & 1) == parity) {
    found.waiting.push_back(thread());
    suspend({"for a phase", at, describe_mbarrier, &found});
  }
}

}  // namespace emulator
