// SPDX-License-Identifier: Apache-2.0
// What lanes of a warp do together: shuffles, votes, matrices from shared memory.
#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "driver/fibres.h"

namespace emulator {
namespace {

/// Lanes on their way into one operation.
struct Meeting {
  const char* what = nullptr;
  u32 mask = 0, arrived = 0;
  void* lanes[32] = {};
  Place first;
};

// Of each warp; as many as different masks are under way.
std::vector<std::vector<Meeting>> meetings;

std::string describe_meeting(const void* object) {
  const auto& meeting = *static_cast<const Meeting*>(object);
  char text[80];
  std::snprintf(text, sizeof(text), "lanes %08x of %08x are there", meeting.arrived, meeting.mask);
  std::string ended;
  for (int i = 0; i < 32; ++i) {
    const int other = warp() * 32 + i;
    if ((meeting.mask & ~meeting.arrived) >> i & 1 && has_ended(other)) ended = ", some have ended";
  }
  return text + ended;
}

Meeting& meeting_of(u32 mask) {
  auto& all = meetings[static_cast<std::size_t>(warp())];
  for (Meeting& each : all) {
    if (each.arrived != 0 && each.mask == mask) return each;
  }
  for (Meeting& each : all) {
    if (each.arrived != 0) continue;
    each = {};
    each.mask = mask;
    return each;
  }
  fail("too many masks under way in one warp");
}

struct Shuffled {
  u64 value;
  int source;
  u64 result;
};
struct Counted {
  int value;
  int result;
};

template <class Combine>
void reduce(void* const (&lanes)[32], Combine combine) {
  bool begun = false;
  int all = 0;
  for (void* lane : lanes) {
    if (lane == nullptr) continue;
    const int value = static_cast<Counted*>(lane)->value;
    all = begun ? combine(all, value) : value;
    begun = true;
  }
  for (void* lane : lanes) {
    if (lane != nullptr) static_cast<Counted*>(lane)->result = all;
  }
}

struct Rows {
  u32 address;
  u32 values[4];
  bool transposed;
};

u32 half_at(u32 address, int index, Place at) {
  std::uint16_t half;
  std::memcpy(&half, shared(address, 16, at) + index * 2, 2);
  return half;
}

}  // namespace

void begin_warps(int warps) { meetings.assign(static_cast<std::size_t>(warps), std::vector<Meeting>(8)); }

void collect(const char* what, u32 mask, void* own, LaneWork run, Place at) {
  const int self = lane();
  if ((mask >> self & 1) == 0) fail(std::string(what) + " by a lane that its mask leaves out", at);
  Meeting& meeting = meeting_of(mask);
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.first = at;
  } else if (meeting.what != what) {
    fail(std::string(what) + " meets " + meeting.what + " at " + to_string(meeting.first) + " in one warp", at);
  }
  meeting.lanes[self] = own;
  meeting.arrived |= 1U << self;
  if (meeting.arrived != mask) return suspend({what, at, describe_meeting, &meeting});
  if (run != nullptr) run(meeting.lanes, mask, at);
  meeting.arrived = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) != 0 && i != self) wake(warp() * 32 + i);
  }
}

u64 shuffle(u32 mask, u64 value, int source, Place at) {
  Shuffled own{value, source, 0};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place place) {
    for (void* lane : lanes) {
      if (lane == nullptr) continue;
      auto& to = *static_cast<Shuffled*>(lane);
      const void* from = lanes[to.source];
      if (from == nullptr) fail("a shuffle from lane " + std::to_string(to.source) + ", which takes no part", place);
      to.result = static_cast<const Shuffled*>(from)->value;
    }
  };
  collect("for a shuffle", mask, &own, run, at);
  return own.result;
}

u32 ballot(u32 mask, bool predicate, Place at) {
  Counted own{static_cast<int>(predicate), 0};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place /*place*/) {
    u32 votes = 0;
    for (int i = 0; i < 32; ++i) {
      if (lanes[i] != nullptr && static_cast<const Counted*>(lanes[i])->value != 0) votes |= 1U << i;
    }
    for (void* lane : lanes) {
      if (lane != nullptr) static_cast<Counted*>(lane)->result = static_cast<int>(votes);
    }
  };
  collect("for a vote", mask, &own, run, at);
  return static_cast<u32>(own.result);
}

int reduce_add(u32 mask, int value, Place at) {
  Counted own{value, 0};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place /*place*/) {
    reduce(lanes, [](int a, int b) { return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b)); });
  };
  collect("for a sum", mask, &own, run, at);
  return own.result;
}

int reduce_min(u32 mask, int value, Place at) {
  Counted own{value, 0};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place /*place*/) {
    reduce(lanes, [](int a, int b) { return a < b ? a : b; });
  };
  collect("for a minimum", mask, &own, run, at);
  return own.result;
}

void warp_barrier(u32 mask, Place at) { collect("for a warp", mask, &mask, nullptr, at); }

void ldmatrix(u32 (&to)[4], u32 row_address, bool transposed, Place at) {
  Rows own{row_address, {}, transposed};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place place) {
    // Row r of matrix i.
    const auto row = [&](int i, int r) { return static_cast<const Rows*>(lanes[i * 8 + r])->address; };
    for (int l = 0; l < 32; ++l) {
      auto& lane = *static_cast<Rows*>(lanes[l]);
      for (int i = 0; i < 4; ++i) {
        const int pair = l % 4 * 2;
        const u32 low = lane.transposed ? half_at(row(i, pair), l / 4, place) : half_at(row(i, l / 4), pair, place);
        const u32 high =
            lane.transposed ? half_at(row(i, pair + 1), l / 4, place) : half_at(row(i, l / 4), pair + 1, place);
        lane.values[i] = low | high << 16;
      }
    }
  };
  collect("for ldmatrix", kWholeWarp, &own, run, at);
  std::memcpy(to, own.values, sizeof(to));
}

void stmatrix(u32 row_address, const u32 (&from)[4], Place at) {
  Rows own{row_address, {from[0], from[1], from[2], from[3]}, false};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place place) {
    for (int l = 0; l < 32; ++l) {
      const auto& lane = *static_cast<const Rows*>(lanes[l]);
      for (int i = 0; i < 4; ++i) {
        const auto& row = *static_cast<const Rows*>(lanes[i * 8 + l / 4]);
        std::memcpy(shared(row.address, 16, place) + l % 4 * 4, &lane.values[i], 4);
      }
    }
  };
  collect("for stmatrix", kWholeWarp, &own, run, at);
}

}  // namespace emulator
