// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"

#include "tessera/error.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kInterval = milliseconds(50);
// How long the caller's thread spins until the others end, before it sleeps. Threads mostly end almost together, and a
// thread that sleeps wakes up too late.
constexpr auto kAwake = milliseconds(2);

}  // namespace

Workers::Workers(int threads, const InterruptCheck& check) noexcept : threads_(threads), check_(check) {
  if (check_.interrupted != nullptr) due_ = Clock::now() + kInterval;
}

void Workers::throw_if_stopped() {
  if (stopped()) throw Error(ErrorCode::cancelled, "run", "an interruption", "to compute to the end");
}

void Workers::ask_when_due() noexcept {
  if (stopped_.load(std::memory_order_relaxed) || Clock::now() < due_) return;
  if (check_.interrupted(check_.user)) stopped_.store(true, std::memory_order_relaxed);
  due_ = Clock::now() + kInterval;
}

void Workers::end_together(int threads) {
  const int others = threads - 1;
  if (std::this_thread::get_id() != caller_) {
    if (ended_.fetch_add(1) + 1 < others) return;
    const std::lock_guard lock(mutex_);
    all_ended_.notify_one();
    return;
  }
  const auto ended = [&] { return ended_.load() == others; };
  for (const auto begin = Clock::now(); !ended() && Clock::now() - begin < kAwake;) std::this_thread::yield();
  while (!ended()) {
    std::unique_lock lock(mutex_);
    if (all_ended_.wait_for(lock, kInterval, ended)) break;
    lock.unlock();
    ask_when_due();
  }
  ended_ = 0;
}

}  // namespace tessera::detail
