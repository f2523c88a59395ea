// SPDX-License-Identifier: Apache-2.0
#include "base/thread_team.h"

#include <pthread.h>

namespace tessera::detail {
namespace {

enum class Team : unsigned char { none, present, lost };

// libgomp keeps a team of workers for each thread that opens parallel regions, so the state is per thread, too.
thread_local Team team = Team::none;

// Called in the child, by the thread that called fork().
void lose_team() {
  if (team == Team::present) team = Team::lost;
}

}  // namespace

bool thread_team_lost() noexcept {
  if (team == Team::none) {
    [[maybe_unused]] static const int kRegistered = pthread_atfork(nullptr, nullptr, &lose_team);
    team = Team::present;
  }
  return team == Team::lost;
}

}  // namespace tessera::detail
