// SPDX-License-Identifier: Apache-2.0
#include "driver/fibres.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <csetjmp>
#include <csignal>
#include <map>
#include <vector>

#include "driver/ready.h"
#include "driver/signals.h"

namespace emulator {

Index thread_index{}, block_index{}, block_size{}, grid_size{};

namespace {

constexpr std::size_t kStackBytes = 512 * 1024;
constexpr std::size_t kPage = 4096;

struct Fibre {
  std::jmp_buf here{};
  bool started = false, ended = false;
  Wait wait;
};

// One block runs at a time: launches are serialised (driver.cpp).
std::vector<Fibre> fibres;
Ready ready;
std::jmp_buf scheduler;
int left = 0;
Entry entry = nullptr;
void** parameters = nullptr;
std::string failure;

/// Stacks, kept for later blocks, each above a page that cannot be touched.
char* stack_of(int thread) {
  static std::vector<char*> stacks;
  while (static_cast<int>(stacks.size()) <= thread) {
    void* memory = ::mmap(nullptr, kPage + kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for the stacks of fibres");
    ::mprotect(memory, kPage, PROT_NONE);
    stacks.push_back(static_cast<char*>(memory) + kPage);
  }
  return stacks[static_cast<std::size_t>(thread)];
}

void body();

/// Goes on with a fibre that can, or has TMA bring boxes until one can. longjmp, because swapcontext makes two system
/// calls; the first time a fibre runs it needs a context all the same, as nothing else in C++ changes to another stack.
[[noreturn]] void run_next() {
  int next = Ready::kBox;
  while (next == Ready::kBox) {
    if (left == 0 || (ready.empty() && boxes_under_way() == 0)) std::longjmp(scheduler, 1);
    next = ready.take(boxes_under_way());
    if (next == Ready::kBox) bring_box(ready.draw_box(boxes_under_way()));
  }
  thread_index.x = static_cast<unsigned>(next);
  Fibre& fibre = fibres[static_cast<std::size_t>(next)];
  if (fibre.started) std::longjmp(fibre.here, 1);
  fibre.started = true;
  ucontext_t context;
  ::getcontext(&context);
  context.uc_stack.ss_sp = stack_of(next);
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  ::makecontext(&context, body, 0);
  ::setcontext(&context);
  std::abort();
}

void body() {
  entry(parameters);
  Fibre& self = fibres[static_cast<std::size_t>(thread())];
  const Place at = self.wait.at;
  thread_ends_with_copies(at);
  thread_ends_with_products(at);
  self.ended = true;
  --left;
  thread_ends_at_barriers();
  run_next();
}

std::string ranges(const std::vector<int>& threads) {
  std::string text;
  for (std::size_t i = 0; i < threads.size();) {
    std::size_t last = i;
    while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
    text += (i > 0 ? ", " : "") + std::to_string(threads[i]);
    if (last > i) text += "–" + std::to_string(threads[last]);
    i = last + 1;
  }
  return text;
}

/// Where the threads of a block wait of which none can go on.
std::string report_stuck() {
  std::map<std::string, std::vector<int>> places;
  for (std::size_t i = 0; i < fibres.size(); ++i) {
    const Wait& wait = fibres[i].wait;
    thread_index.x = static_cast<unsigned>(i);  // describe() asks for the warp
    std::string place = "have ended";
    if (!fibres[i].ended) {
      place = "wait " + std::string(wait.what) +
              (wait.describe != nullptr ? " (" + wait.describe(wait.object) + ")" : "") + " at " + to_string(wait.at);
    }
    places[place].push_back(static_cast<int>(i));
  }
  std::string text = "the block is stuck:";
  for (const auto& [place, threads] : places) text += "\n    threads " + ranges(threads) + " " + place;
  return text;
}

std::string in_block(const std::string& what) {
  return "block (" + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ", " +
         std::to_string(block_index.z) + "): " + what;
}

}  // namespace

int threads_left() { return left; }
bool has_ended(int thread) { return fibres[static_cast<std::size_t>(thread)].ended; }

std::string to_string(Place at) {
  // Without the temporary folder that the compiler found a header in.
  std::string file = at.file;
  if (const std::size_t begin = file.find("/headers/"); begin != std::string::npos) file = file.substr(begin + 9);
  return file + ":" + std::to_string(at.line);
}

void suspend(const Wait& wait) {
  Fibre& self = fibres[static_cast<std::size_t>(thread())];
  self.wait = wait;
  if (setjmp(self.here) == 0) run_next();
}

void wake(int thread) { ready.add(thread); }

void fail(const std::string& what, Place at) {
  failure = "thread " + std::to_string(thread()) + " at " + to_string(at) + ": " + what;
  std::longjmp(scheduler, 1);
}
void fail(const char* what, Place at) { fail(std::string(what), at); }

void fail_from_signal(const std::string& what) {
  const Wait& last = fibres[static_cast<std::size_t>(thread())].wait;
  const std::string where = *last.what != '\0' ? "last waited at " + to_string(last.at) : "has not waited yet";
  failure = "thread " + std::to_string(thread()) + ", which " + where + ": " + what;
  std::longjmp(scheduler, 1);
}

std::string run_block(Entry kernel, void** kernel_parameters, int threads, std::uint64_t order) {
  entry = kernel;
  parameters = kernel_parameters;
  fibres.assign(static_cast<std::size_t>(threads), {});
  left = threads;
  failure.clear();
  ready.begin(threads / 32, order);
  begin_barriers();
  begin_warps(threads / 32);
  begin_copies(threads);
  begin_products(threads);
  for (int i = 0; i < threads; ++i) wake(i);
  if (setjmp(scheduler) == 0) run_next();
  if (failure.empty() && left > 0) failure = report_stuck();
  if (failure.empty()) failure = end_barriers();
  return failure.empty() ? "" : in_block(failure);
}

}  // namespace emulator
