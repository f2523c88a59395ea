// SPDX-License-Identifier: Apache-2.0
// Runs that an InterruptCheck ends. Each problem would take tens of seconds to the end.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/dlpack.h"
#include "base/parallel.h"
#include "call.h"
#include "tessera/error.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// Answers yes from the `yes_at`-th question on.
struct Asked {
  explicit Asked(int question) : yes_at(question) {}
  int yes_at;
  int times = 0;
  std::thread::id by = std::this_thread::get_id();
  bool only_by_the_caller = true;

  static bool answer(void* self) {
    auto& asked = *static_cast<Asked*>(self);
    asked.only_by_the_caller &= std::this_thread::get_id() == asked.by;
    return ++asked.times >= asked.yes_at;
  }
  InterruptCheck check() { return {&Asked::answer, this}; }
};

class Interrupt : public testing::TestWithParam<const char*> {};

TEST_P(Interrupt, EndsARun) {
  Call call(GetParam());
  for (const int threads : {1, 3}) {
    Wishes wishes;
    wishes.splits = 1;
    Executor executor(make_plan(call.problem, Target::cpu(threads), wishes));
    Asked asked(2);
    call.bindings.interrupt = asked.check();
    const auto begin = Clock::now();
    try {
      executor.run(call.bindings);
      ADD_FAILURE() << "computed to the end";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cancelled) << error.what();
    }
    EXPECT_LT(Clock::now() - begin, seconds(5));
    EXPECT_EQ(asked.times, 2);
    EXPECT_TRUE(asked.only_by_the_caller);
  }
}

INSTANTIATE_TEST_SUITE_P(Passes, Interrupt,
                         testing::Values("attention sq=131072 hq=2 d=64",
                                         "attention b=2 sq=1 sk=65536 hq=8192 hkv=8 d=64 dtype=bf16",
                                         "attention pass=backward sq=65536 hq=1 d=64",
                                         "linear_chunk t=65536 h=1 d=512 dtype=bf16"));

TEST(Interrupted, EndsTheReference) {
  Call call("attention sq=8192 hq=4 d=64");
  Wishes wishes;
  wishes.implementation = "cpu.reference";
  Asked asked(1);
  call.bindings.interrupt = asked.check();
  Executor executor(make_plan(call.problem, Target::cpu(1), wishes));
  EXPECT_THROW(executor.run(call.bindings), Error);
  EXPECT_EQ(asked.times, 1);
}

TEST(Interrupted, EndsWhatOnlyOneThreadComputes) {
  for (const int busy : {0, 1}) {
    Asked asked(3);
    detail::Workers workers(2, asked.check());
    workers.parallel([&](int thread) {
      const auto begin = Clock::now();
      while (thread == busy && !workers.stopped() && Clock::now() - begin < seconds(20)) {
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
    EXPECT_TRUE(workers.stopped());
    EXPECT_EQ(asked.times, 3);
    EXPECT_TRUE(asked.only_by_the_caller);
  }
}

TEST(Interrupted, IsNotAskedByShortRuns) {
  Call call("attention sq=64 d=16");
  Asked asked(1);
  call.bindings.interrupt = asked.check();
  Executor executor(make_plan(call.problem, Target::cpu(3)));
  for (int i = 0; i < 100; ++i) executor.run(call.bindings);
  EXPECT_EQ(asked.times, 0);
}

TEST(Interrupted, EndsARunOfTheCAbi) {
  Call call("attention sq=131072 hq=2 d=64");
  tessera_problem* problem = nullptr;
  tessera_plan* plan = nullptr;
  tessera_executor* executor = nullptr;
  tessera_bindings* bindings = nullptr;
  ASSERT_EQ(tessera_problem_parse(call.problem.to_string().c_str(), &problem), TESSERA_OK);
  ASSERT_EQ(tessera_plan_make(problem, nullptr, nullptr, &plan), TESSERA_OK);
  ASSERT_EQ(tessera_executor_create(plan, &executor), TESSERA_OK);
  ASSERT_EQ(tessera_bindings_create(&bindings), TESSERA_OK);
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) {
    DLTensor tensor{};
    call[slot].to_dlpack(tensor);
    ASSERT_EQ(tessera_bindings_set_dlpack(bindings, std::string(to_string(slot)).c_str(), &tensor), TESSERA_OK);
  }
  int asked = 0;
  ASSERT_EQ(tessera_bindings_set_interrupt(
                bindings, [](void* user) { return ++*static_cast<int*>(user) == 2 ? 7 : 0; }, &asked),
            TESSERA_OK);
  EXPECT_EQ(tessera_executor_run(executor, bindings, nullptr), TESSERA_CANCELLED);
  EXPECT_EQ(asked, 2);
  EXPECT_STREQ(tessera_code_name(TESSERA_CANCELLED), "cancelled");
  tessera_bindings_destroy(bindings);
  tessera_executor_destroy(executor);
  tessera_plan_destroy(plan);
  tessera_problem_destroy(problem);
}

}  // namespace
}  // namespace tessera
