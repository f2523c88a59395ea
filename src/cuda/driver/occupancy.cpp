// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver/occupancy.h"

#include <algorithm>

#include "cuda/driver/device.h"
#include "shared/types.h"

namespace tessera::cuda {
namespace {

// The driver reserves this much shared memory for each block, and a multiprocessor has this much more than a block may
// request.
constexpr int kReserved = 1024;

}  // namespace

int blocks_that_fit(int bytes, const Target& target) {
  return (target.shared_memory + kReserved) / (bytes + kReserved);
}

std::size_t bytes_to_ask_for(std::size_t bytes, const Target& target) {
  if (!target.emulated) return bytes;
  const std::int64_t room = device(target.index).shared_memory + kReserved;
  const std::int64_t one_more = blocks_that_fit(static_cast<int>(bytes), target) + 1;
  const std::int64_t too_many = round_up(room / one_more + 1, std::int64_t{16});
  return std::max(bytes, static_cast<std::size_t>(too_many - kReserved));
}

}  // namespace tessera::cuda
