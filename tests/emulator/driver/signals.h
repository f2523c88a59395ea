// SPDX-License-Identifier: Apache-2.0
// Accesses to memory that is not there end a launch, as on a GPU, and not the process.
#pragma once

#include <csignal>
#include <string>

namespace emulator {

/// While it lives, what a fibre does wrong becomes a failed launch.
class CaughtSignals {
 public:
  CaughtSignals();
  ~CaughtSignals();
  CaughtSignals(const CaughtSignals&) = delete;
  CaughtSignals& operator=(const CaughtSignals&) = delete;

 private:
  struct sigaction before_[4]{};
  stack_t stack_before_{};
};

/// Ends the launch from a signal's handler.
[[noreturn]] void fail_from_signal(const std::string& what);

}  // namespace emulator
