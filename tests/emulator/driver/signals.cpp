// SPDX-License-Identifier: Apache-2.0
#include "driver/signals.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "driver/memory.h"

namespace emulator {
namespace {

constexpr std::array<int, 4> kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
// A fibre that has used up its stack cannot handle a signal on it.
alignas(16) char handler_stack[64 * 1024];

void handle(int signal, siginfo_t* info, void* /*context*/) {
  char text[160];
  if (signal == SIGILL) {
    std::snprintf(text, sizeof(text),
                  "a vector at an address that is not aligned, an index behind an array's end, a division by zero or a "
                  "shift by too much");
  } else if (signal == SIGFPE) {
    std::snprintf(text, sizeof(text), "division of integers by zero");
  } else {
    std::snprintf(text, sizeof(text), "an access to %p, %s", info->si_addr, place_of(info->si_addr).c_str());
  }
  fail_from_signal(text);
}

}  // namespace

CaughtSignals::CaughtSignals() {
  const stack_t stack{handler_stack, 0, sizeof(handler_stack)};
  ::sigaltstack(&stack, &stack_before_);
  struct sigaction action {};
  action.sa_sigaction = handle;
  // The handler does not return, so that the signal must not stay blocked.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before_[i]);
}

CaughtSignals::~CaughtSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  ::sigaltstack(&stack_before_, nullptr);
}

}  // namespace emulator
