// SPDX-License-Identifier: Apache-2.0
// Worker threads that cost no allocation once OpenMP has its team, for one thread too: libgomp allocates a team and its
// work shares anew for every parallel region of one thread, so that case leaves OpenMP out.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/thread_team.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace tessera::detail {

/// Runs body(thread) once on each of `threads` threads (fewer if OpenMP has fewer, one if thread_team_lost()) and waits
/// for all.
template <class Body>
void parallel(int threads, const Body& body) {
#ifdef _OPENMP
  if (threads > 1 && !thread_team_lost()) {
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num());
    return;
  }
#endif
  body(0);
}

/// Indices 0 … count − 1, each handed out once, in order, to whichever thread asks next.
class WorkQueue {
 public:
  explicit WorkQueue(std::int64_t count) noexcept : count_(count) {}
  template <class Task>
  void drain(const Task& task) {
    for (std::int64_t i = next_++; i < count_; i = next_++) task(i);
  }

 private:
  std::atomic<std::int64_t> next_{0};
  std::int64_t count_;
};

/// task(index) for every index below count, on up to `threads` threads.
template <class Task>
void parallel_for(int threads, std::int64_t count, const Task& task) {
  WorkQueue queue(count);
  parallel(threads, [&](int) { queue.drain(task); });
}

}  // namespace tessera::detail
