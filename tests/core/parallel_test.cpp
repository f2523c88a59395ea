// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

namespace tessera::detail {
namespace {

TEST(Parallel, EveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    for (const std::int64_t count : {0, 1, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
      Workers(threads).parallel_for(count, [&](std::int64_t i) { ++seen[static_cast<std::size_t>(i)]; });
      for (const auto& times : seen) EXPECT_EQ(times, 1);
    }
  }
}

TEST(Parallel, ThreadsAreNumberedFromZero) {
  for (const int threads : {1, 3}) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(threads));
    Workers(threads).parallel([&](int thread) { ++seen.at(static_cast<std::size_t>(thread)); });
    EXPECT_EQ(seen[0], 1);
  }
}

/// Sum of 0 … 999 by up to three threads.
int sum_in_parallel() {
  std::atomic<int> sum = 0;
  Workers(3).parallel_for(1000, [&](std::int64_t i) { sum += static_cast<int>(i); });
  return sum;
}

/// The exit status of a forked child that runs `body`, or −1 if it did not end within 20 seconds.
template <class Body>
int status_of_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Parallel, AForkedChildComputesAlone) {
  EXPECT_EQ(sum_in_parallel(), 499500);
  const auto sums = [] { return sum_in_parallel() == 499500 ? 7 : 8; };
  EXPECT_EQ(status_of_child(sums), 7);
  EXPECT_EQ(status_of_child([&] { return status_of_child(sums); }), 7) << "a child's child";
  EXPECT_EQ(sum_in_parallel(), 499500) << "the parent goes on";
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
constexpr bool kThreadSanitizer = false;
#endif

TEST(Parallel, AThreadOfAForkedChildHasWorkers) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts a thread";
  EXPECT_EQ(sum_in_parallel(), 499500);
  EXPECT_EQ(status_of_child([] {
              std::atomic<int> threads = 0;
              std::thread([&] { Workers(2).parallel([&](int) { ++threads; }); }).join();
              return threads.load();
            }),
            2);
}

}  // namespace
}  // namespace tessera::detail
