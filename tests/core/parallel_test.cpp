// SPDX-License-Identifier: Apache-2.0
#include "core/parallel.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::detail {
namespace {

TEST(Parallel, EveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    for (const std::int64_t count : {0, 1, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
      parallel_for(threads, count, [&](std::int64_t i) { ++seen[static_cast<std::size_t>(i)]; });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

TEST(Parallel, ThreadsAreNumberedFromZero) {
  for (const int threads : {1, 3}) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(threads));
    parallel(threads, [&](int thread) { ++seen.at(static_cast<std::size_t>(thread)); });
    EXPECT_EQ(seen[0], 1);
  }
}

}  // namespace
}  // namespace tessera::detail
