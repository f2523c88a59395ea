// SPDX-License-Identifier: Apache-2.0
// What an executor asks of a backend, in which order, and the table of backends and implementations.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "expect_error.h"
#include "plan/implementations.h"

namespace tessera {
namespace {

constexpr const char* kLine = "attention sq=8";
constexpr std::size_t kBytes = 256;

/// Writes down what it is asked.
class FakeBackend final : public detail::Backend {
 public:
  struct Kept final : detail::DeviceState {};

  [[nodiscard]] const char* name() const noexcept override { return "a fake"; }
  [[nodiscard]] Target device(int /*index*/) const override { return {}; }
  [[nodiscard]] std::vector<std::string> isas() const override { return {}; }
  [[nodiscard]] Target resolve(const Target& target) const override { return target; }
  [[nodiscard]] Support supports(const Wishes& /*wishes*/) const override { return Support::yes(); }
  void plan(detail::PlanState& /*state*/) const override {}

  [[nodiscard]] std::unique_ptr<detail::DeviceState> open(const detail::PlanState& /*state*/) const override {
    asked.emplace_back("open");
    if (!is_there) throw Error(ErrorCode::unsupported, "target", "a fake", "one that is there");
    auto state = std::make_unique<Kept>();
    kept = state.get();
    return state;
  }
  [[nodiscard]] void* allocate(const Target& /*target*/, std::size_t bytes) const override {
    asked.push_back("allocate " + std::to_string(bytes));
    return memory;
  }
  void release(const Target& /*target*/, void* given) const noexcept override {
    asked.emplace_back(given == memory ? "release" : "release of something else");
  }
  void prepare(const detail::PlanState& /*state*/, detail::DeviceState* state) const override {
    asked.emplace_back(state == kept ? "prepare" : "prepare with something else");
  }
  void run(const detail::PlanState& /*state*/, detail::DeviceState* state, const Bindings& bindings,
           std::byte* workspace, Stream stream) const override {
    asked.emplace_back(state == kept ? "run" : "run with something else");
    last_bindings = &bindings;
    last_workspace = workspace;
    last_stream = stream.handle;
  }

  bool is_there = true;
  alignas(64) mutable std::byte memory[kBytes] = {};
  mutable std::vector<std::string> asked;
  mutable const detail::DeviceState* kept = nullptr;
  mutable const Bindings* last_bindings = nullptr;
  mutable const std::byte* last_workspace = nullptr;
  mutable const void* last_stream = nullptr;
};

using Asked = std::vector<std::string>;

class Backends : public testing::Test {
 protected:
  /// A plan of the CPU's that runs on the fake.
  [[nodiscard]] Plan plan(std::size_t bytes = kBytes) const {
    auto state = std::make_shared<detail::PlanState>(make_plan(call_.problem, Target::cpu(1)).state());
    state->backend = &backend_;
    state->workspace_bytes = bytes;
    return Plan(std::move(state));
  }

  FakeBackend backend_;
  Call call_{kLine};
};

TEST_F(Backends, AnExecutorOpensAllocatesRunsAndReleases) {
  int queue = 0;
  {
    Executor executor(plan());
    executor.prepare();
    executor.run(call_.bindings, {&queue});
  }
  EXPECT_EQ(backend_.asked, (Asked{"open", "allocate 256", "prepare", "run", "release"}));
  EXPECT_EQ(backend_.last_bindings, &call_.bindings);
  EXPECT_EQ(backend_.last_workspace, backend_.memory);
  EXPECT_EQ(backend_.last_stream, &queue);
}

TEST_F(Backends, MemoryOfTheCallerIsNeitherAllocatedNorReleased) {
  alignas(64) std::byte own[kBytes];
  { Executor(plan(), own, kBytes).run(call_.bindings); }
  EXPECT_EQ(backend_.asked, (Asked{"open", "run"}));
  EXPECT_EQ(backend_.last_workspace, own);
}

TEST_F(Backends, NothingIsAllocatedForNoWorkspace) {
  { Executor(plan(0)).run(call_.bindings); }
  EXPECT_EQ(backend_.asked, (Asked{"open", "run"}));
}

TEST_F(Backends, OnlyValidBindingsAreRun) {
  Executor executor(plan());
  call_.bindings[Slot::q] = Tensor{};
  expect_error([&] { executor.run(call_.bindings); }, ErrorCode::invalid_argument, "q");
  EXPECT_EQ(backend_.asked, (Asked{"open", "allocate 256"}));
}

TEST_F(Backends, AMovedExecutorReleasesOnce) {
  {
    Executor first(plan());
    Executor second(std::move(first));
    expect_error([&] { first.run(call_.bindings); }, ErrorCode::invalid_argument,  // NOLINT(bugprone-use-after-move)
                 "executor");
    first.prepare();
    second.run(call_.bindings);
  }
  EXPECT_EQ(backend_.asked, (Asked{"open", "allocate 256", "run", "release"}));
}

TEST_F(Backends, ADeviceThatIsNotThereAllocatesNothing) {
  backend_.is_there = false;
  expect_error([&] { Executor{plan()}; }, ErrorCode::unsupported, "target");
  EXPECT_EQ(backend_.asked, (Asked{"open"}));
}

TEST(Implementations, HaveNamesOfTheirOwnAndABackend) {
  std::set<std::string> names;
  for (const detail::Implementation* row : detail::implementations()) {
    EXPECT_TRUE(names.insert(row->name).second) << row->name;
    EXPECT_EQ(row->by_name_only, std::string(row->name) == "cpu.reference") << row->name;
    const std::string device = row->device == DeviceType::cuda ? "cuda." : "cpu.";
    EXPECT_EQ(std::string(row->name).substr(0, device.size()), device);
  }
  EXPECT_NE(&detail::backend(DeviceType::cpu), &detail::backend(DeviceType::cuda));
}

}  // namespace
}  // namespace tessera
