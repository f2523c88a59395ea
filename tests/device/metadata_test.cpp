// SPDX-License-Identifier: Apache-2.0
// Hostile lengths, page tables and their like on a GPU: nothing outside is touched, and metadata=report says what was
// wrong. Skipped without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "cuda/driver/device.h"
#include "cuda/driver/driver.h"
#include "device/graph.h"
#include "plan/implementations.h"
#include "shared/metadata.h"
#include "tessera/executor.h"

namespace tessera {
namespace {

constexpr int kLow = std::numeric_limits<int>::min();
constexpr int kHigh = std::numeric_limits<int>::max();
constexpr std::size_t kCanary = 4096;  // bytes in front of a tensor and behind it
constexpr unsigned char kFill = 0x5a;

/// Tensors in device memory with canaries around them.
class Tensors {
 public:
  ~Tensors() {
    for (const auto& [slot, held] : held_) cuda::release(0, held.memory);
  }

  void add(Slot slot, DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor tensor = Tensor::contiguous(nullptr, dtype, shape, {DeviceType::cuda, 0});
    Held held;
    held.bytes = static_cast<std::size_t>(tensor.numel()) * size_of(dtype);
    held.memory = static_cast<std::byte*>(cuda::allocate(0, held.bytes + 2 * kCanary));
    const std::vector<unsigned char> fill(held.bytes + 2 * kCanary, kFill);
    const std::vector<unsigned char> zeros(held.bytes, 0);
    upload(held.memory, fill.data(), fill.size());
    upload(held.memory + kCanary, zeros.data(), zeros.size());
    tensor.data = held.memory + kCanary;
    bindings[slot] = tensor;
    held_[slot] = held;
  }
  void ints(Slot slot, const std::vector<int>& values, std::initializer_list<std::int64_t> shape) {
    add(slot, DType::int32, shape);
    set(slot, values);
  }
  void set(Slot slot, const std::vector<int>& values) { upload(bindings[slot].data, values.data(), values.size() * 4); }

  [[nodiscard]] int status() const {
    int value = -1;
    download(&value, bindings[Slot::status].data, sizeof(value));
    return value;
  }
  [[nodiscard]] std::vector<float> floats(Slot slot) const {
    std::vector<float> values(held_.at(slot).bytes / sizeof(float));
    download(values.data(), bindings[slot].data, held_.at(slot).bytes);
    return values;
  }
  void expect_canaries() const {
    std::vector<unsigned char> bytes;
    for (const auto& [slot, held] : held_) {
      bytes.resize(held.bytes + 2 * kCanary);
      download(bytes.data(), held.memory, bytes.size());
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        const bool outside = i < kCanary || i >= kCanary + held.bytes;
        if (outside && bytes[i] != kFill) {
          ADD_FAILURE() << to_string(slot) << ": byte " << static_cast<long>(i) - static_cast<long>(kCanary) << " of "
                        << held.bytes << " was written";
          break;
        }
      }
    }
  }

  Bindings bindings;

 private:
  struct Held {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
  };
  static void upload(void* to, const void* from, std::size_t bytes) {
    const cuda::CurrentContext context(0);
    if (bytes > 0) cuda::check(cuda::driver().copy_to_device(cuda::address(to), from, bytes), "cuMemcpyHtoD");
    // A stream that does not wait for the default one must find it there.
    cuda::check(cuda::driver().context_synchronize(), "cuCtxSynchronize");
  }
  static void download(void* to, const void* from, std::size_t bytes) {
    const cuda::CurrentContext context(0);
    if (bytes > 0) cuda::check(cuda::driver().copy_from_device(to, cuda::address(from), bytes), "cuMemcpyDtoH");
  }
  std::map<Slot, Held> held_;
};

class DeviceMetadata : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::find_driver() == nullptr || cuda::devices().empty()) GTEST_SKIP() << "no GPU";
  }

  /// Runs with one tensor changed; the status must name it and the sequence. nullopt: nothing is wrong.
  static void expect_violation(const char* line, Tensors& t, Slot slot, const std::vector<int>& values,
                               std::optional<std::int64_t> sequence) {
    t.set(slot, values);
    t.set(Slot::status, {0});
    Executor executor(make_plan(Problem::parse(line), Target::cuda_device(0)));
    executor.run(t.bindings);
    {
      const cuda::CurrentContext context(0);
      ASSERT_EQ(cuda::driver().context_synchronize(), cuda::kSuccess) << line;
    }
    const auto found = violation_of(t.status());
    EXPECT_EQ(found.has_value(), sequence.has_value()) << line << ", " << to_string(slot) << ", status " << t.status();
    if (found && sequence) {
      EXPECT_EQ(to_string(found->slot), to_string(slot)) << line;
      EXPECT_EQ(found->sequence, *sequence) << line;
    }
    t.expect_canaries();
  }
};

TEST(StatusWord, NamesSlotAndSequence) {
  EXPECT_FALSE(violation_of(0));
  EXPECT_FALSE(violation_of(-5));
  EXPECT_FALSE(violation_of(255));
  for (const int sequence : {0, 1, 65535}) {
    const auto found = violation_of(cuda::status_of(sequence, static_cast<int>(Slot::page_table)));
    ASSERT_TRUE(found);
    EXPECT_EQ(found->slot, Slot::page_table);
    EXPECT_EQ(found->sequence, sequence);
  }
  EXPECT_LT(cuda::status_of(3, 40), cuda::status_of(4, 2));  // the first sequence's is the smallest
  EXPECT_GT(cuda::status_of(kHigh, 40), 0);
}

TEST_F(DeviceMetadata, PagesAndLengthsOfATable) {
  const char* line = "attention b=3 sq=4 sk=64 hq=2 d=64 dtype=bf16 kv=table page=16 pages=8 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::o}) t.add(slot, DType::bf16, {3, 4, 2, 64});
  for (const Slot slot : {Slot::k, Slot::v}) t.add(slot, DType::bf16, {8, 16, 2, 64});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::seqused_k, {64, 20, 0}, {3});
  const std::vector<int> good{0,     1,    2,  3,  4,  5,
                              kHigh, kLow, -1, -1, -1, -1};  // what lengths do not reach may be anything
  t.ints(Slot::page_table, good, {3, 4});
  expect_violation(line, t, Slot::page_table, good, std::nullopt);
  expect_violation(line, t, Slot::page_table, {0, 1, 2, 8, 4, 5, 0, 0, 0, 0, 0, 0}, 0);
  expect_violation(line, t, Slot::page_table, {0, 1, 2, 3, 4, kLow, 0, 0, 0, 0, 0, 0}, 1);
  t.set(Slot::page_table, good);
  expect_violation(line, t, Slot::seqused_k, {64, 20, -1}, 2);
  expect_violation(line, t, Slot::seqused_k, {64, 16, kHigh}, 2);
  expect_violation(line, t, Slot::seqused_k, {kLow, kHigh, 0}, 0);
}

TEST_F(DeviceMetadata, BoundariesOfPackedSequences) {
  const char* line = "attention b=3 sq=8 sk=16 hq=2 d=64 dtype=bf16 layout=varlen tq=20 tk=40 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::o}) t.add(slot, DType::bf16, {20, 2, 64});
  for (const Slot slot : {Slot::k, Slot::v}) t.add(slot, DType::bf16, {40, 2, 64});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::cu_seqlens_q, {0, 8, 12, 20}, {4});
  t.ints(Slot::cu_seqlens_k, {0, 16, 20, 36}, {4});
  expect_violation(line, t, Slot::cu_seqlens_k, {0, 16, 20, 36}, std::nullopt);
  expect_violation(line, t, Slot::cu_seqlens_k, {0, 17, 20, 36}, 0);
  expect_violation(line, t, Slot::cu_seqlens_k, {0, 16, 10, 20}, 1);
  expect_violation(line, t, Slot::cu_seqlens_k, {0, 16, 30, 41}, 2);
  expect_violation(line, t, Slot::cu_seqlens_k, {kLow, kHigh, kLow, kHigh}, 0);
  t.set(Slot::cu_seqlens_k, {0, 16, 20, 36});
  expect_violation(line, t, Slot::cu_seqlens_q, {1, 8, 12, 20}, 0);
  expect_violation(line, t, Slot::cu_seqlens_q, {0, 8, 12, kHigh}, 2);
}

// Below the sequence's first row, however far: a difference of the two would not fit 32 bits.
TEST_F(DeviceMetadata, ABoundaryBelowEveryOtherEndsAnEmptySequence) {
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::o}) t.add(slot, DType::bf16, {20, 1, 64});
  for (const Slot slot : {Slot::k, Slot::v}) t.add(slot, DType::bf16, {2, 16, 1, 64});
  t.add(Slot::lse, DType::fp32, {1, 20});
  t.ints(Slot::cu_seqlens_q, {0, 8, kLow}, {3});
  Executor executor(make_plan(
      Problem::parse("attention b=2 sq=8 sk=16 d=64 dtype=bf16 layout=varlen tq=20 kv=dense lse metadata=clamp"),
      Target::cuda_device(0)));
  executor.run(t.bindings);
  const std::vector<float> lse = t.floats(Slot::lse);
  for (std::size_t row = 0; row < lse.size(); ++row) {
    if (row < 8) {
      EXPECT_NEAR(lse[row], std::log(16.0F), 1e-5F) << row;
    } else {
      EXPECT_EQ(lse[row], 0.0F) << row << " was written";
    }
  }
  t.expect_canaries();
}

TEST_F(DeviceMetadata, CompressedPageTables) {
  const char* line = "attention b=2 sq=4 sk=64 hq=2 d=64 dtype=bf16 kv=csr page=16 pages=8 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::o}) t.add(slot, DType::bf16, {2, 4, 2, 64});
  for (const Slot slot : {Slot::k, Slot::v}) t.add(slot, DType::bf16, {8, 16, 2, 64});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::page_indptr, {0, 2, 5}, {3});
  t.ints(Slot::page_indices, {7, 6, 5, 4, 3, 2}, {6});
  t.ints(Slot::last_page_len, {16, 3}, {2});
  expect_violation(line, t, Slot::last_page_len, {16, 3}, std::nullopt);
  expect_violation(line, t, Slot::last_page_len, {16, 17}, 1);
  expect_violation(line, t, Slot::last_page_len, {0, 3}, 0);
  t.set(Slot::last_page_len, {16, 3});
  expect_violation(line, t, Slot::page_indices, {7, 6, 5, 4, 8, 2}, 1);
  expect_violation(line, t, Slot::page_indices, {kLow, 6, 5, 4, 3, kHigh}, 0);
  t.set(Slot::page_indices, {7, 6, 5, 4, 3, 2});
  expect_violation(line, t, Slot::page_indptr, {0, 2, 7}, 1);
  expect_violation(line, t, Slot::page_indptr, {-3, 2, 5}, 0);
}

TEST_F(DeviceMetadata, RoomForNewTokens) {
  const char* line = "kv_append b=2 sq=4 sk=32 d=64 dtype=bf16 kv=table page=16 pages=4 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::k, Slot::v}) t.add(slot, DType::bf16, {4, 16, 1, 64});
  for (const Slot slot : {Slot::k_new, Slot::v_new}) t.add(slot, DType::bf16, {2, 4, 1, 64});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::page_table, {0, 1, 2, 3}, {2, 2});
  t.ints(Slot::seqused_k, {28, 0}, {2});
  expect_violation(line, t, Slot::seqused_k, {28, 0}, std::nullopt);
  expect_violation(line, t, Slot::seqused_k, {29, 0}, 0);
  expect_violation(line, t, Slot::seqused_k, {28, kHigh}, 1);
  expect_violation(line, t, Slot::seqused_k, {28, kLow}, 1);
  t.set(Slot::seqused_k, {28, 0});
  expect_violation(line, t, Slot::page_table, {0, 1, -7, 3}, 1);
  expect_violation(line, t, Slot::page_table, {0, kHigh, 2, 3}, 0);
}

TEST_F(DeviceMetadata, SlotsOfStates) {
  const char* line = "linear_decode b=3 h=2 d=64 dtype=bf16 slots=4 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) t.add(slot, DType::bf16, {3, 1, 2, 64});
  t.add(Slot::state, DType::fp32, {4, 2, 64, 64});
  t.add(Slot::decay_slopes, DType::fp32, {2});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::state_slots, {3, 1, 0}, {3});
  t.ints(Slot::dest_slots, {3, 1, 0}, {3});
  expect_violation(line, t, Slot::state_slots, {3, -1, 0}, std::nullopt);
  expect_violation(line, t, Slot::state_slots, {kLow, 1, -5}, std::nullopt);
  expect_violation(line, t, Slot::state_slots, {3, 4, 0}, 1);
  expect_violation(line, t, Slot::state_slots, {3, 1, kHigh}, 2);
  t.set(Slot::state_slots, {3, 1, 0});
  expect_violation(line, t, Slot::dest_slots, {4, 1, 0}, 0);
  expect_violation(line, t, Slot::dest_slots, {-1, 1, 0}, std::nullopt);
}

TEST_F(DeviceMetadata, CursorsOfRings) {
  const char* line = "linear_decode b=3 h=2 d=64 dtype=bf16 slots=4 ring=5 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) t.add(slot, DType::bf16, {3, 1, 2, 64});
  t.add(Slot::state, DType::fp32, {4, 2, 64, 64});
  for (const Slot slot : {Slot::ring_k, Slot::ring_v}) t.add(slot, DType::bf16, {4, 2, 10, 64});
  t.add(Slot::decay_slopes, DType::fp32, {2});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::state_slots, {3, -1, 0}, {3});
  t.ints(Slot::ring_cursor, {0, 0, 0}, {3});
  expect_violation(line, t, Slot::ring_cursor, {0, 5, 11}, std::nullopt);
  expect_violation(line, t, Slot::ring_cursor, {6, kLow, 0}, std::nullopt);  // of a sequence without a state
  expect_violation(line, t, Slot::ring_cursor, {-1, 0, 0}, 0);
  expect_violation(line, t, Slot::ring_cursor, {0, 0, 12}, 2);
  expect_violation(line, t, Slot::ring_cursor, {0, 0, kHigh}, 2);
}

TEST_F(DeviceMetadata, SlotsAndLengthsOfSequences) {
  const char* line = "linear_chunk b=2 t=20 h=2 d=64 dtype=bf16 varlen tq=30 slots=4 metadata=report";
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) t.add(slot, DType::bf16, {30, 2, 64});
  t.add(Slot::state, DType::fp32, {4, 2, 64, 64});
  t.add(Slot::decay_slopes, DType::fp32, {2});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::cu_seqlens_q, {0, 20, 30}, {3});
  t.ints(Slot::state_slots, {3, 1}, {2});
  expect_violation(line, t, Slot::state_slots, {3, -1}, std::nullopt);
  expect_violation(line, t, Slot::state_slots, {3, 4}, 1);
  t.set(Slot::state_slots, {3, 1});
  expect_violation(line, t, Slot::cu_seqlens_q, {0, 10, 30}, std::nullopt);
  expect_violation(line, t, Slot::cu_seqlens_q, {0, 21, 30}, 0);
  expect_violation(line, t, Slot::cu_seqlens_q, {0, 20, 31}, 1);
}

TEST_F(DeviceMetadata, GraphsReportWhatTheirLaunchesFind) {
  const Target target = Target::cuda_device(0);
  Tensors t;
  for (const Slot slot : {Slot::q, Slot::o}) t.add(slot, DType::bf16, {2, 1, 2, 64});
  for (const Slot slot : {Slot::k, Slot::v}) t.add(slot, DType::bf16, {4, 16, 2, 64});
  t.ints(Slot::status, {0}, {1});
  t.ints(Slot::seqused_k, {32, 17}, {2});
  t.ints(Slot::page_table, {0, 1, 2, 3}, {2, 2});
  Executor executor(make_plan(
      Problem::parse("attention b=2 sq=1 sk=32 hq=2 d=64 dtype=bf16 kv=table page=16 pages=4 metadata=report"),
      target));
  executor.prepare();
  test::Graph graph(target, [&](Stream stream) { executor.run(t.bindings, stream); });
  graph.launch();
  EXPECT_EQ(t.status(), 0);
  t.set(Slot::page_table, {0, 1, 2, 4});
  EXPECT_EQ(t.status(), 0) << "before the launch";
  graph.launch();
  const auto found = violation_of(t.status());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->slot, Slot::page_table);
  EXPECT_EQ(found->sequence, 1);
  // The first violation stays until the caller clears it.
  t.set(Slot::page_table, {0, 1, 2, 3});
  t.set(Slot::seqused_k, {-1, 17});
  graph.launch();
  ASSERT_TRUE(violation_of(t.status()));
  EXPECT_EQ(violation_of(t.status())->slot, Slot::page_table);
  t.set(Slot::status, {0});
  graph.launch();
  ASSERT_TRUE(violation_of(t.status()));
  EXPECT_EQ(violation_of(t.status())->slot, Slot::seqused_k);
  t.set(Slot::status, {0});
  t.set(Slot::seqused_k, {0, 32});
  graph.launch();
  EXPECT_EQ(t.status(), 0);
  t.expect_canaries();
}

}  // namespace
}  // namespace tessera
