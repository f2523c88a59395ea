// SPDX-License-Identifier: Apache-2.0
// Worker threads that allocate nothing once OpenMP has its team. A single thread runs without OpenMP, because libgomp
// allocates a team and its work shares for every parallel region of one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "base/thread_team.h"
#include "tessera/executor.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace tessera::detail {

/// The threads of one run, and whether the run is to end early. The thread that constructs it must be the one that
/// calls parallel().
class Workers {
 public:
  explicit Workers(int threads, const InterruptCheck& check = {}) noexcept;
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Whether the rest of the work is to be left out. Every worker calls this before each tile. It takes nanoseconds,
  /// except that the caller's thread calls the InterruptCheck if it is due.
  [[nodiscard]] bool stopped() noexcept {
    if (check_.interrupted != nullptr && std::this_thread::get_id() == caller_) ask_when_due();
    return stopped_.load(std::memory_order_relaxed);
  }

  /// Throws Error{cancelled} if stopped().
  void throw_if_stopped();

  /// Runs body(thread) once on each of the threads (fewer if OpenMP has fewer, one if thread_team_lost()) and waits for
  /// all.
  template <class Body>
  void parallel(const Body& body) {
#ifdef _OPENMP
    if (threads_ > 1 && !thread_team_lost()) {
#pragma omp parallel num_threads(threads_)
      {
        body(omp_get_thread_num());
        if (check_.interrupted != nullptr) end_together(omp_get_num_threads());
      }
      return;
    }
#endif
    body(0);
  }

  /// Runs task(index) for every index below count, unless stopped.
  template <class Task>
  void parallel_for(std::int64_t count, const Task& task);

 private:
  void ask_when_due() noexcept;
  /// Called by each thread at the end of a region. The caller's thread keeps calling the check until all others are
  /// here.
  void end_together(int threads);

  const int threads_;
  const InterruptCheck check_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::chrono::steady_clock::time_point due_;
  std::atomic<bool> stopped_ = false;
  std::atomic<int> ended_ = 0;  // threads of the region other than the caller's
  std::mutex mutex_;
  std::condition_variable all_ended_;
};

/// Hands out the indices 0 … count − 1 in order, each once, to the next thread that asks; none after a stop.
class WorkQueue {
 public:
  WorkQueue(Workers& workers, std::int64_t count) noexcept : workers_(workers), count_(count) {}
  template <class Task>
  void drain(const Task& task) {
    for (std::int64_t i = next_++; i < count_ && !workers_.stopped(); i = next_++) task(i);
  }

 private:
  Workers& workers_;
  std::atomic<std::int64_t> next_{0};
  std::int64_t count_;
};

template <class Task>
void Workers::parallel_for(std::int64_t count, const Task& task) {
  WorkQueue queue(*this, count);
  parallel([&](int) { queue.drain(task); });
}

}  // namespace tessera::detail
