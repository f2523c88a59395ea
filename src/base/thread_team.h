// SPDX-License-Identifier: Apache-2.0
// OpenMP's threads after fork().
#pragma once

namespace tessera::detail {

/// Whether the calling thread is the one that a fork() left in a child, and had worker threads before. fork() copies
/// libgomp's record of them, but not the threads: a parallel region of this thread would wait for them forever. Threads
/// that the child starts get their own workers. Must be called before each parallel region.
bool thread_team_lost() noexcept;

}  // namespace tessera::detail
