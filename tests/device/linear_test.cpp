// SPDX-License-Identifier: Apache-2.0
// Decode steps of linear attention: several tokens at once against one after another, and pools whose offsets do not
// fit 32 bits.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <new>
#include <vector>

#include "device/place.h"

namespace tessera::test {
namespace {

class LinearDecode : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, LinearDecode, every_place(), name_of_place);

std::vector<std::byte> bytes_of(cases::Inputs& inputs, Slot slot) {
  for (const auto& buffer : inputs.buffers()) {
    if (buffer.slot == slot) return {buffer.bytes.begin(), buffer.bytes.end()};
  }
  return {};
}

TEST_P(LinearDecode, TokensAtOnceAreTokensOneByOne) {
  for (const char* form : {"", " layout=kv", " dv=128", " dtype=fp32 layout=kv"}) {
    const std::string common = std::string("linear_decode b=3 h=2 d=64 slots=5 seed=81") +
                               (std::strstr(form, "dtype") == nullptr ? " dtype=bf16" : "") + form;
    SCOPED_TRACE(common);
    const cases::Case together = cases::Case::parse(common + " t=4 state_slots=4,-1,2");
    cases::Inputs inputs(together);
    PlacedRun run(inputs, make_plan(together.problem, target_));
    ASSERT_EQ(run.run(), "");
    const std::vector<std::byte> o = bytes_of(inputs, Slot::o);
    const std::vector<std::byte> state = bytes_of(inputs, Slot::state);
    inputs.restore();
    ASSERT_NE(bytes_of(inputs, Slot::state), state);
    run.upload();
    Problem one = together.problem;
    one.seqlen_q = 1;
    Executor step(make_plan(one, target_));
    for (std::int64_t t = 0; t < together.problem.seqlen_q; ++t) {
      Bindings bindings = run.bindings();
      for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) {
        Tensor& tensor = bindings[slot];
        tensor.shape[1] = 1;
        tensor.byte_offset += t * tensor.strides[1] * static_cast<std::int64_t>(size_of(tensor.dtype));
      }
      step.run(bindings, run.stream());
    }
    run.wait();
    ASSERT_EQ(run.download(), "");
    EXPECT_TRUE(bytes_of(inputs, Slot::o) == o);
    EXPECT_TRUE(bytes_of(inputs, Slot::state) == state);
  }
}

/// The states that sequences leave are what a longer sequence has there: outputs of the rest agree to rounding.
TEST_P(LinearDecode, GoesOnWhereASequenceEnds) {
  for (const char* form : {" layout=kv", " dtype=fp16 d=128"}) {
    const std::string line =
        std::string("linear_chunk b=3 t=83 h=2 slots=5 state_slots=4,-1,2 dest_slots=4,0,2 seed=83") +
        (std::strstr(form, "dtype") == nullptr ? " dtype=bf16 d=64" : "") + form;
    SCOPED_TRACE(line);
    const cases::Case whole = cases::Case::parse(line);
    cases::Inputs inputs(whole);
    const reference::Result oracle =
        reference::compute(whole.problem, inputs.bindings(), reference::Arithmetic::oracle);
    const std::vector<reference::Result> plain = plain_before(whole.problem, inputs.bindings());
    PlacedRun run(inputs, make_plan(whole.problem, target_));
    run.upload();
    const auto part = [&](Operation operation, std::int64_t first, std::int64_t tokens) {
      Problem problem = whole.problem;
      problem.operation = operation;
      problem.seqlen_q = tokens;
      Bindings bindings = run.bindings();
      if (first > 0) bindings[Slot::state_slots] = bindings[Slot::dest_slots];
      for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) {
        Tensor& tensor = bindings[slot];
        tensor.shape[1] = tokens;
        tensor.byte_offset += first * tensor.strides[1] * static_cast<std::int64_t>(size_of(tensor.dtype));
      }
      Executor(make_plan(problem, target_)).run(bindings, run.stream());
    };
    part(Operation::linear_chunk, 0, 70);
    part(Operation::linear_decode, 70, 8);
    part(Operation::linear_chunk, 78, 5);
    run.wait();
    ASSERT_EQ(run.download(), "");
    EXPECT_EQ(judge(whole.problem, inputs.bindings(), oracle, plain), "");
  }
}

/// Device memory for one test, or none.
class Memory {
 public:
  explicit Memory(std::size_t bytes) {
    try {
      data_ = cuda::allocate(0, bytes);
    } catch (const std::bad_alloc&) {
      data_ = nullptr;
    }
  }
  ~Memory() { cuda::release(0, data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

TEST(LinearDecodePool, SlotTimesStrideBeyond32Bits) {
  if (cuda::find_driver() == nullptr || cuda::devices().empty()) GTEST_SKIP() << "no GPU";
  constexpr std::int64_t kDim = 64;
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + kDim;  // elements: an int32 holds no slot but the first
  const Memory pool(static_cast<std::size_t>(kStride + kDim * kDim) * 4);
  if (pool.data() == nullptr) GTEST_SKIP() << "no 8 GiB of device memory";
  const Target target = Target::cuda_device(0);
  for (const char* layout : {"", " layout=kv"}) {
    // The case's second state, in the first place of a pool of its own, and in the second of the long one.
    const cases::Case near =
        cases::Case::parse(std::string("linear_decode d=64 slots=2 state_slots=1 seed=82") + layout);
    cases::Inputs inputs(near);
    PlacedRun run(inputs, make_plan(near.problem, target));
    run.upload();
    Bindings far = run.bindings();
    Tensor& state = far[Slot::state];
    const std::size_t bytes = kDim * kDim * sizeof(float);
    std::byte* place = static_cast<std::byte*>(pool.data()) + kStride * 4;
    const auto* content = inputs.bindings()[Slot::state].bytes() + bytes;
    const cuda::CurrentContext context(0);
    cuda::check(cuda::driver().copy_to_device(cuda::address(place), content, bytes), "cuMemcpyHtoD");
    state.data = pool.data();
    state.byte_offset = 0;
    state.strides[0] = kStride;
    run.executor().run(far, run.stream());
    run.start();
    run.wait();
    ASSERT_EQ(run.download(), "");
    std::vector<std::byte> got(bytes);
    cuda::check(cuda::driver().copy_from_device(got.data(), cuda::address(place), bytes), "cuMemcpyDtoH");
    EXPECT_EQ(std::memcmp(got.data(), inputs.bindings()[Slot::state].bytes() + bytes, bytes), 0) << layout;
  }
}

}  // namespace
}  // namespace tessera::test
