// SPDX-License-Identifier: Apache-2.0
// Blocks that draw row tiles from counters in the workspace: a run must not depend on what the one before has left
// there, whatever became of that one.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "cases/device_copy.h"
#include "cases/inputs/numbers.h"
#include "cuda/driver/device.h"
#include "device/place.h"

namespace tessera::test {
namespace {

class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes), data_(cuda::allocate(0, bytes)) {}
  ~DeviceBytes() { cuda::release(0, data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  void fill(unsigned char value, Stream stream) const {
    cuda::check(
        cuda::driver().fill_bytes(cuda::address(data_), value, bytes_, static_cast<cuda::StreamHandle>(stream.handle)),
        "cuMemsetD8Async");
  }
  void upload(const void* from) const {
    cuda::check(cuda::driver().copy_to_device(cuda::address(data_), from, bytes_), "cuMemcpyHtoD");
  }
  [[nodiscard]] std::vector<std::byte> download() const {
    std::vector<std::byte> host(bytes_);
    cuda::check(cuda::driver().copy_from_device(host.data(), cuda::address(data_), bytes_), "cuMemcpyDtoH");
    return host;
  }

 private:
  std::size_t bytes_;
  void* data_;
};

/// A batch of packed sequences with more row tiles than a GPU takes at once.
class PackedBatch {
 public:
  static constexpr int kSequences = 96, kLength = 300, kHeads = 8, kDim = 64;
  static constexpr std::size_t kRowBytes = std::size_t{2} * kHeads * kDim;

  explicit PackedBatch(const Target& target)
      : plan_(make_plan(Problem::parse("attention b=" + std::to_string(kSequences) + " sq=" + std::to_string(kLength) +
                                       " layout=varlen tq=" + std::to_string(kTokens) + " hq=8 d=64 dtype=bf16 causal"),
                        target)),
        workspace_(plan_.workspace_bytes()),
        executor_(plan_, workspace_.data(), workspace_.size()) {
    cases::RandomNumbers random(7, 0);
    std::vector<std::uint16_t> numbers(kRowBytes / 2 * kTokens);
    for (DeviceBytes* tensor : {&q_, &k_, &v_}) {
      for (auto& number : numbers) number = static_cast<std::uint16_t>(0x3E00 + (random.bits() & 0x81FF));
      tensor->upload(numbers.data());
    }
    const auto tensor = [](const DeviceBytes& memory, DType dtype, std::initializer_list<std::int64_t> shape) {
      return Tensor::contiguous(memory.data(), dtype, shape, {DeviceType::cuda, 0});
    };
    bindings_[Slot::q] = tensor(q_, DType::bf16, {kTokens, kHeads, kDim});
    bindings_[Slot::k] = tensor(k_, DType::bf16, {kTokens, kHeads, kDim});
    bindings_[Slot::v] = tensor(v_, DType::bf16, {kTokens, kHeads, kDim});
    bindings_[Slot::o] = tensor(o_, DType::bf16, {kTokens, kHeads, kDim});
    bindings_[Slot::cu_seqlens_q] = tensor(lengths_q_, DType::int32, {kSequences + 1});
    bindings_[Slot::cu_seqlens_k] = tensor(lengths_k_, DType::int32, {kSequences + 1});
    write_lengths();
    lengths_k_.upload(boundaries().data());
  }

  [[nodiscard]] bool draws() const { return plan_.implementation() == "cuda.fwd_wgmma"; }
  [[nodiscard]] const DeviceBytes& workspace() const { return workspace_; }
  [[nodiscard]] const DeviceBytes& lengths() const { return lengths_q_; }
  [[nodiscard]] Stream stream() const { return cases::device_stream(0); }
  void write_lengths() { lengths_q_.upload(boundaries().data()); }
  void start() { executor_.run(bindings_, stream()); }
  /// The output of a run, which is to write all of it.
  std::vector<std::byte> output() {
    o_.fill(0xFF, stream());
    start();
    cases::wait_for(stream());
    return o_.download();
  }

 private:
  static constexpr std::int64_t kTokens = std::int64_t{kSequences} * kLength;

  static std::vector<std::int32_t> boundaries() {
    std::vector<std::int32_t> all(kSequences + 1);
    for (int i = 0; i <= kSequences; ++i) all[static_cast<std::size_t>(i)] = i * kLength;
    return all;
  }

  Plan plan_;
  DeviceBytes workspace_;
  Executor executor_;
  DeviceBytes q_{kRowBytes * kTokens}, k_{kRowBytes * kTokens}, v_{kRowBytes * kTokens}, o_{kRowBytes * kTokens};
  DeviceBytes lengths_q_{4 * (kSequences + 1)}, lengths_k_{4 * (kSequences + 1)};
  Bindings bindings_;
};

class TileScheduler : public OnPlace {
 protected:
  void SetUp() override {
    OnPlace::SetUp();
    if (IsSkipped()) return;
    context_.emplace(0);
    batch_.emplace(target_);
    if (!batch_->draws()) GTEST_SKIP() << "no block takes more than one row tile";
    EXPECT_GE(batch_->workspace().size(), 16U) << "two counters";
    right_ = batch_->output();
    for (std::size_t i = 0; i + 1 < right_.size(); i += 2) {
      ASSERT_FALSE(right_[i] == std::byte{0xFF} && right_[i + 1] == std::byte{0xFF}) << "element " << i / 2;
    }
  }
  std::optional<cuda::CurrentContext> context_;
  std::optional<PackedBatch> batch_;
  std::vector<std::byte> right_;
};
INSTANTIATE_TEST_SUITE_P(Places, TileScheduler, ::testing::Values("gpu"), name_of_place);

TEST_P(TileScheduler, AnyWorkspaceWillDo) {
  for (const unsigned char value : {0x00, 0x01, 0x7F, 0x80, 0xFF}) {
    batch_->workspace().fill(value, batch_->stream());
    EXPECT_TRUE(batch_->output() == right_) << int{value};
    EXPECT_TRUE(batch_->output() == right_) << int{value} << ", once more";
  }
}

/// While lengths change some blocks find row tiles and others none: what such a run writes is lost, and no more.
TEST_P(TileScheduler, ARunAfterLengthsThatChangedIsRight) {
  for (int time = 0; time < 40; ++time) {
    std::atomic<bool> done = false;
    std::thread writer([&] {
      const cuda::CurrentContext context(0);
      const Stream stream = cases::device_stream(0);  // of this thread
      while (!done) {
        batch_->lengths().fill(0, stream);
        cases::wait_for(stream);
        batch_->write_lengths();
      }
    });
    for (int run = 0; run < 30; ++run) batch_->start();
    cases::wait_for(batch_->stream());
    done = true;
    writer.join();
    batch_->write_lengths();
    ASSERT_TRUE(batch_->output() == right_) << "after " << time + 1 << " times";
  }
}

}  // namespace
}  // namespace tessera::test
