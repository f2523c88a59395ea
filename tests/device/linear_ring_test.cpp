// SPDX-License-Identifier: Apache-2.0
// Decode steps whose tokens wait in a ring beside the state: any mixture of them, of rejected tokens, flushes and steps
// without a ring is the long sequence.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "device/place.h"

namespace tessera::test {
namespace {

class LinearRing : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, LinearRing, every_place(), name_of_place);

/// One call: a step of `tokens`, of which `kept` stay; a step of none flushes.
struct Call {
  bool ring;
  std::int64_t tokens, kept;
};
constexpr Call kFlush{true, 0, 0};

/// Fills the device's copy of an int32 tensor.
void write_ints(const Tensor& tensor, const std::vector<std::int32_t>& values) {
  const std::size_t bytes = values.size() * sizeof(std::int32_t);
  if (tensor.device.type == DeviceType::cpu) {
    std::memcpy(tensor.bytes(), values.data(), bytes);
    return;
  }
  const cuda::CurrentContext context(tensor.device.index);
  cuda::check(cuda::driver().copy_to_device(cuda::address(tensor.bytes()), values.data(), bytes), "cuMemcpyHtoD");
}

/// Calls on sequences of a `linear_chunk` line, whose oracle judges outputs and states. The rings' own tensors come
/// from a second case. Returns how many states the rings' steps have written, "" in `failure` if all is well.
class Schedule {
 public:
  Schedule(const std::string& form, std::int64_t tokens, std::int64_t ring, const Target& target)
      : whole_(cases::Case::parse("linear_chunk b=3 h=2 slots=5 state_slots=4,0,2 seed=85 t=" + std::to_string(tokens) +
                                  form)),
        beside_(cases::Case::parse("linear_decode b=3 h=2 slots=5 state_slots=4,0,2 ring_cursors=0,0,0 seed=86 ring=" +
                                   std::to_string(ring) + form)),
        inputs_(whole_),
        rings_(beside_),
        oracle_(reference::compute(whole_.problem, inputs_.bindings(), reference::Arithmetic::oracle)),
        plain_(plain_before(whole_.problem, inputs_.bindings())),
        target_(target),
        run_(inputs_, make_plan(beside_.problem, target)),
        ring_run_(rings_, make_plan(beside_.problem, target)) {
    run_.upload();
    ring_run_.upload();
    // The other half, empty, is as good a place to begin.
    cursors_ = {0, static_cast<std::int32_t>(ring + 1), 0};
  }

  void call(const Call& call) {
    Problem problem = beside_.problem;
    problem.seqlen_q = call.tokens;
    if (!call.ring) problem.linear.ring = 0;
    Bindings bindings = run_.bindings();
    for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) {
      Tensor& tensor = bindings[slot];
      if (problem.only_flushes()) {
        tensor = {};
        continue;
      }
      tensor.shape[1] = call.tokens;
      tensor.byte_offset += done_ * tensor.strides[1] * static_cast<std::int64_t>(size_of(tensor.dtype));
    }
    if (call.ring) {
      for (const Slot slot : {Slot::ring_k, Slot::ring_v, Slot::ring_cursor})
        bindings[slot] = ring_run_.bindings()[slot];
      write_ints(bindings[Slot::ring_cursor], cursors_);
    }
    Executor(make_plan(problem, target_)).run(bindings, run_.stream());
    run_.wait();
    for (std::int32_t& cursor : cursors_) {
      if (!call.ring) continue;
      const auto tokens = static_cast<std::int32_t>(call.tokens);
      cursor =
          problem.only_flushes() ? 0 : ring_advance(cursor, tokens, static_cast<std::int32_t>(problem.linear.ring));
      cursor -= static_cast<std::int32_t>(call.tokens - call.kept);
    }
    done_ += call.kept;
  }

  /// "" or how the result differs from the long sequence.
  std::string judged() {
    EXPECT_EQ(done_, whole_.problem.seqlen_q);
    const std::string damage = run_.download() + ring_run_.download();
    return damage.empty() ? judge(whole_.problem, inputs_.bindings(), oracle_, plain_) : damage;
  }
  std::vector<std::byte> states() {
    run_.download();
    for (const auto& buffer : inputs_.buffers()) {
      if (buffer.slot == Slot::state) return {buffer.bytes.begin(), buffer.bytes.end()};
    }
    return {};
  }

 private:
  cases::Case whole_, beside_;
  cases::Inputs inputs_, rings_;
  reference::Result oracle_;
  std::vector<reference::Result> plain_;
  Target target_;
  PlacedRun run_, ring_run_;
  std::vector<std::int32_t> cursors_;
  std::int64_t done_ = 0;
};

constexpr const char* kForms[] = {" d=64", " d=128 layout=kv", " d=64 dtype=bf16:bf16:bf16:fp32 layout=kv",
                                  " d=128 dtype=bf16:bf16:bf16:fp32"};

TEST_P(LinearRing, SingleStepsAreTheLongSequence) {
  for (const std::int64_t ring : {1, 4, 12, 16}) {
    for (const char* form : kForms) {
      SCOPED_TRACE(std::to_string(ring) + form);
      Schedule schedule(form, 3 * ring, ring, target_);
      const std::vector<std::byte> first = schedule.states();
      for (std::int64_t t = 0; t < ring; ++t) schedule.call({true, 1, 1});
      EXPECT_TRUE(schedule.states() == first);  // a full ring, and nothing of it in a state
      schedule.call({true, 1, 1});
      EXPECT_FALSE(schedule.states() == first);
      for (std::int64_t t = ring + 1; t < 3 * ring; ++t) schedule.call({true, 1, 1});
      schedule.call(kFlush);
      EXPECT_EQ(schedule.judged(), "");
    }
  }
}

TEST_P(LinearRing, AnyStepsAreTheLongSequence) {
  for (const char* form : kForms) {
    SCOPED_TRACE(form);
    Schedule schedule(form, 33, 8, target_);
    for (const std::int64_t tokens : {3, 5, 1, 8, 2, 7, 4, 3}) schedule.call({true, tokens, tokens});
    schedule.call(kFlush);
    EXPECT_EQ(schedule.judged(), "");
  }
}

/// A rejected token is fed again: counted twice it would show.
TEST_P(LinearRing, RejectedTokensLeaveNoTrace) {
  for (const char* form : kForms) {
    SCOPED_TRACE(form);
    Schedule schedule(form, 24, 6, target_);
    for (const std::int64_t kept : {1, 4, 0, 2, 0, 3, 4, 1, 0, 2, 4}) schedule.call({true, 4, kept});
    schedule.call({true, 3, 3});
    schedule.call(kFlush);
    EXPECT_EQ(schedule.judged(), "");
  }
}

TEST_P(LinearRing, FlushesOnDemandAndStepsWithoutARing) {
  for (const char* form : kForms) {
    SCOPED_TRACE(form);
    Schedule schedule(form, 21, 8, target_);
    for (const Call& call : {Call{true, 3, 3}, kFlush, Call{false, 2, 2}, Call{false, 1, 1}, Call{true, 5, 2}, kFlush,
                             kFlush, Call{true, 6, 6}, Call{true, 6, 6}, kFlush, Call{false, 1, 1}}) {
      schedule.call(call);
    }
    EXPECT_EQ(schedule.judged(), "");
  }
}

}  // namespace
}  // namespace tessera::test
