// SPDX-License-Identifier: Apache-2.0
// Metadata that no caller should bind, with metadata=clamp: lengths, boundaries, page tables, lists and positions of
// any value. On a GPU nothing outside the tensors is read or written; on the CPU they are refused before anything is
// written. Every number inside the tensors is finite and every byte around them is poison, a NaN, so that what is read
// from there shows.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "cases/inputs/numbers.h"
#include "cpu/reference/number.h"
#include "device/guarded_copy.h"
#include "device/place.h"

namespace tessera::test {
namespace {

constexpr double kHarmless = 0.5;

bool is_floating(DType dtype) { return dtype == DType::fp32 || dtype == DType::fp16 || dtype == DType::bf16; }

/// Values for one tensor of metadata; of those that its type does not hold, the low bits.
class HostileValues {
 public:
  static constexpr int kPatterns = 7;

  HostileValues(const Problem& problem, DType dtype, int pattern, std::uint64_t seed)
      : low_(dtype == DType::int64 ? std::numeric_limits<std::int64_t>::min() : std::numeric_limits<int>::min()),
        high_(dtype == DType::int64 ? std::numeric_limits<std::int64_t>::max() : std::numeric_limits<int>::max()),
        pattern_(pattern),
        random_(seed, static_cast<std::uint64_t>(pattern)),
        edges_{0,
               1,
               problem.seqlen_q,
               problem.total_q,
               problem.kv.seqlen,
               problem.kv.total,
               problem.kv.page_size,
               problem.kv.pages,
               problem.linear.states,
               problem.linear.ring,
               2 * problem.linear.ring + 1,
               problem.key_blocks(),
               problem.query_blocks()} {}

  std::int64_t next() { return value(pattern_); }

 private:
  std::int64_t value(int pattern) {
    switch (pattern) {
      case 0:
        return low_;
      case 1:
        return high_;
      case 2:
        return -1;
      case 3:  // any bits
        return static_cast<std::int64_t>(random_.bits());
      case 4:  // beside what is allowed
        return edges_[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(edges_.size())))] +
               random_.between(-1, 1);
      case 5:  // falling boundaries
        return falling_ -= 3;
      default:
        return value(static_cast<int>(random_.below(kPatterns - 1)));
    }
  }

  std::int64_t low_, high_;
  int pattern_;
  cases::RandomNumbers random_;
  std::array<std::int64_t, 13> edges_;
  std::int64_t falling_ = 40;
};

/// A case whose numbers are all finite, and its metadata as they should be.
class HostileCase {
 public:
  explicit HostileCase(const std::string& line) : case_(cases::Case::parse(line)), inputs_(case_) {
    for (const auto& buffer : inputs_.buffers()) {
      const Tensor& tensor = inputs_.bindings()[buffer.slot];
      if (is_floating(tensor.dtype)) {
        reference::for_each_element(tensor, [&](std::int64_t, std::int64_t offset) {
          if (std::isnan(reference::read(tensor, offset))) reference::write(tensor, offset, kHarmless);
        });
      } else if (!inputs_.is_output(buffer.slot) && tensor.dtype != DType::uint64) {
        metadata_.push_back(buffer.slot);
        good_.emplace_back(buffer.bytes.begin(), buffer.bytes.end());
      }
      if (!inputs_.is_output(buffer.slot)) continue;
      everything_[buffer.slot].written.assign(static_cast<std::size_t>(tensor.numel()), 1);
      nothing_[buffer.slot].written.assign(static_cast<std::size_t>(tensor.numel()), 0);
    }
    inputs_.remember();
  }

  [[nodiscard]] const cases::Case& of() const { return case_; }
  [[nodiscard]] cases::Inputs& inputs() { return inputs_; }
  [[nodiscard]] const std::vector<Slot>& metadata() const { return metadata_; }

  /// Outputs as at the start, metadata as they should be but for those of `non_finite`.
  void spoil(const std::vector<Slot>& non_finite, int pattern, std::uint64_t seed) {
    inputs_.restore();
    std::size_t index = 0;
    for (const auto& buffer : inputs_.buffers()) {
      if (index == metadata_.size() || buffer.slot != metadata_[index]) continue;
      std::copy(good_[index].begin(), good_[index].end(), buffer.bytes.begin());
      ++index;
    }
    for (const Slot slot : non_finite) {
      const Tensor& tensor = inputs_.bindings()[slot];
      HostileValues values(case_.problem, tensor.dtype, pattern, seed + static_cast<std::uint64_t>(slot));
      reference::for_each_element(tensor,
                                  [&](std::int64_t, std::int64_t offset) { put(tensor, offset, values.next()); });
    }
    inputs_.remember();
  }

  /// "" or what was touched that should not have been.
  [[nodiscard]] std::string damage(bool refused) const { return inputs_.find_damage(refused ? nothing_ : everything_); }
  /// "" or the output that holds what no number inside the tensors can give.
  [[nodiscard]] std::string impossible_output() {
    for (const auto& buffer : inputs_.buffers()) {
      if (!inputs_.is_output(buffer.slot)) continue;
      const Tensor& tensor = inputs_.bindings()[buffer.slot];
      std::string found;
      reference::for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
        const double value = reference::read(tensor, offset);
        // Untouched entries hold −1; counts are of blocks, indices one less.
        const bool possible = tensor.dtype == DType::uint32 ||
                              (is_floating(tensor.dtype) ? !std::isnan(value)
                                                         : value >= -1 && value <= static_cast<double>(most_blocks()));
        if (!possible && found.empty()) {
          found = std::string(to_string(buffer.slot)) + " element " + std::to_string(index) + " is " +
                  std::to_string(value);
        }
      });
      if (!found.empty()) return found;
    }
    return "";
  }

 private:
  [[nodiscard]] std::int64_t most_blocks() const {
    const Problem& p = case_.problem;
    if (p.operation == Operation::nsa_pool) return p.kv.total / p.nsa.stride;
    if (p.operation != Operation::nsa_select) return p.key_blocks();
    return (p.kv.seqlen + p.nsa.block - 1) / p.nsa.block;
  }
  static void put(const Tensor& tensor, std::int64_t offset, std::int64_t value) {
    std::memcpy(tensor.bytes() + offset * static_cast<std::int64_t>(size_of(tensor.dtype)), &value,
                size_of(tensor.dtype));  // the low bytes
  }

  cases::Case case_;
  cases::Inputs inputs_;
  std::vector<Slot> metadata_;
  std::vector<std::vector<std::byte>> good_;  // of the whole buffers
  reference::Result everything_, nothing_;
};

/// A run whose tensors end, or begin, where nothing is mapped. Does nothing where there are no such places.
class GuardedRun {
 public:
  GuardedRun(cases::Inputs& inputs, const Plan& plan, GuardedSide side) {
    if (!is_on_gpu(plan.target())) return;
    const VirtualMemory* memory = VirtualMemory::find(plan.target().index);
    if (memory == nullptr) return;
    copy_.emplace(*memory, inputs, plan.workspace_bytes(), plan.target().index, side);
    executor_.emplace(plan, copy_->workspace(), plan.workspace_bytes());
  }
  /// Throws where a kernel faults.
  void run() {
    if (!copy_) return;
    const Stream stream = cases::device_stream(executor_->plan().target().index);
    copy_->upload();
    executor_->run(copy_->bindings(), stream);
    cases::wait_for(stream);
    copy_->download();
  }

 private:
  std::optional<GuardedCopy> copy_;
  std::optional<Executor> executor_;
};

class HostileMetadata : public OnPlace {
 protected:
  void expect_contained(const std::string& line) {
    HostileCase hostile(line);
    ASSERT_FALSE(hostile.metadata().empty()) << line;
    Wishes wishes;
    wishes.splits = hostile.of().wishes.splits;
    const Plan plan = make_plan(hostile.of().problem, target_, wishes);
    PlacedRun run(hostile.inputs(), plan);
    GuardedRun guarded[] = {{hostile.inputs(), plan, GuardedSide::begin}, {hostile.inputs(), plan, GuardedSide::end}};
    expect_right(hostile, run, line);
    int refused = 0;
    std::vector<std::vector<Slot>> choices{hostile.metadata()};
    for (const Slot slot : hostile.metadata()) choices.push_back({slot});
    for (const std::vector<Slot>& non_finite : choices) {
      for (int pattern = 0; pattern < HostileValues::kPatterns; ++pattern) {
        const std::uint64_t seeds = pattern < 3 ? 1 : 4;  // of those with random values
        for (std::uint64_t seed = 0; seed < seeds; ++seed) {
          SCOPED_TRACE(line + ", pattern " + std::to_string(pattern) + ", seed " + std::to_string(seed) + ", " +
                       (non_finite.size() > 1 ? "all" : std::string(to_string(non_finite.front()))));
          hostile.spoil(non_finite, pattern, seed);
          const bool is_refused = !runs(run);
          refused += is_refused ? 1 : 0;
          ASSERT_EQ(hostile.damage(is_refused), "");
          ASSERT_EQ(hostile.impossible_output(), "");
          for (GuardedRun& one : guarded) ASSERT_NO_THROW(one.run());
        }
      }
    }
    // Only the host can look before it computes.
    EXPECT_EQ(refused > 0, !is_on_gpu(target_)) << line;
  }

 private:
  /// With metadata as they should be the result is right.
  static void expect_right(HostileCase& hostile, PlacedRun& run, const std::string& line) {
    hostile.spoil({}, 0, 0);
    const Problem& problem = hostile.of().problem;
    const Bindings& bindings = hostile.inputs().bindings();
    const auto oracle = reference::compute(problem, bindings, reference::Arithmetic::oracle);
    const auto plain = plain_before(problem, bindings);
    ASSERT_EQ(run.run(), "") << line;
    EXPECT_EQ(judge(problem, bindings, oracle, plain), "") << line;
    EXPECT_EQ(hostile.inputs().find_damage(oracle), "") << line;
  }
  /// false if the host has refused.
  bool runs(PlacedRun& run) const {
    if (is_on_gpu(target_)) {
      EXPECT_EQ(run.run(), "");
      return true;
    }
    try {
      run.run();
      return true;
    } catch (const Error&) {
      return false;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Places, HostileMetadata, every_place(), name_of_place);

TEST_P(HostileMetadata, PageTables) {
  const std::string common = "attention dtype=bf16 b=3 hq=4 hkv=2 d=64 lse ";
  expect_contained(common + "sq=1 sk=300 kv=table page=16 pages=60 splits=3");
  expect_contained(common + "sq=40 sk=150 kv=table page=7 pages=70 seqused_q causal sink");
  expect_contained(common + "sq=40 sk=150 kv=csr page=16 pages=31 seqused_q causal");
  expect_contained(common + "sq=2 sk=150 kv=csr page=1 pages=500 splits=2");
}

TEST_P(HostileMetadata, PackedSequences) {
  for (const char* dims : {"d=64", "d=128", "d=80 dv=40", "d=64 dv=512"}) {
    expect_contained("attention b=3 sq=90 sk=150 layout=varlen tq=200 tk=300 hq=4 hkv=2 dtype=bf16 causal lse " +
                     std::string(dims));
  }
  expect_contained(
      "attention b=3 sq=50 sk=90 layout=varlen tq=100 tk=200 seqused_q seqused_k hq=2 d=64 dtype=fp16 lse");
  expect_contained("attention b=2 sq=5 sk=300 layout=varlen tq=8 tk=500 hq=4 hkv=1 d=128 dtype=bf16 lse splits=4");
}

TEST_P(HostileMetadata, UsedLengthsAndPositions) {
  expect_contained(
      "attention b=2 sq=60 sk=150 seqused_q seqused_k hq=2 d=64 dtype=bf16 window=30:5 alibi lse "
      "q_offset=90,3 k_offset=0,4");
  expect_contained(
      "attention b=2 sq=60 sk=150 seqused_k hq=2 d=64 dtype=bf16 dropout=0.2 score=relative mask=document "
      "lse q_offset=90,3 k_offset=0,4");
  expect_contained(
      "attention b=2 sq=60 sk=150 seqused_k hq=2 d=64 dtype=bf16 compressed_causal=4:2 lse q_offset=200,3");
}

TEST_P(HostileMetadata, TwoSegments) {
  const std::string common = "attention b=2 sq=40 sk=100 hq=4 hkv=2 d=64 dtype=bf16 causal lse ";
  expect_contained(common + "kv=table page=16 pages=20 kv2=csr sk2=70 page2=8 pages2=20 k_offset2=100,90");
  expect_contained(common + "kv=varlen tk=170 kv2=varlen sk2=70 tk2=120");
  expect_contained(common + "kv=table page=16 pages=20 kv2=varlen sk2=70 tk2=120");
  expect_contained(common + "kv=dense seqused_k kv2=csr sk2=70 page2=8 pages2=20");
}

TEST_P(HostileMetadata, Lists) {
  const std::string common = "attention b=2 sq=100 sk=200 hq=4 hkv=2 d=64 dtype=bf16 seqused_k lse block=32x32 ";
  for (const char* list :
       {"list=indices", "list=indices:kv:b:full mask=document causal", "list=transposed:1:1",
        "list=transposed:q:b:full mask=prefix", "list=bitmask:kv", "list=bitmask:q:b:full mask=prefix"}) {
    expect_contained(common + list);
  }
  expect_contained(
      "attention b=2 sq=60 sk=200 layout=varlen tq=90 tk=300 hq=2 d=128 dtype=bf16 lse block=17x40 "
      "list=indices splits=2");
}

TEST_P(HostileMetadata, Gradients) {
  const std::string common = "attention pass=backward dtype=bf16 ";
  const std::string packed = common + "b=3 sq=90 sk=150 layout=varlen tq=200 tk=300 hq=4 hkv=2 causal ";
  for (const char* words :
       {"d=64", "d=128", "d=128 deterministic", "d=64 sink dlse", "d=192 dv=128", "d=64 dropout=0.2"}) {
    expect_contained(packed + words);
  }
  // Sequences that share rows, and so the counts of an order of sums, with many tiles of keys in the one.
  expect_contained(common + "b=3 sq=256 sk=1100 layout=varlen tq=512 tk=1300 hq=2 d=128 deterministic");
  expect_contained(common + "b=2 sq=60 sk=150 seqused_q seqused_k hq=2 d=64 window=30:5 q_offset=90,3 k_offset=0,4");
  expect_contained(common + "b=2 sq=40 sk=100 hq=4 hkv=2 d=64 seqused_k kv2=varlen sk2=70 tk2=120 causal");
}

TEST_P(HostileMetadata, MassesAndNextLists) {
  const std::string common = "attention b=2 sq=100 sk=200 hq=4 hkv=2 d=64 dtype=bf16 block=32x32 lse ";
  expect_contained(common + "kv=table page=16 list=indices mass=mean next=indices threshold=0.05");
  expect_contained(common +
                   "layout=varlen tq=150 tk=300 seqused_q list=transposed mass=rms next=bitmask threshold=0.05");
  expect_contained(common + "seqused_k seqused_q next=indices threshold=0.1");
}

TEST_P(HostileMetadata, NativeSparseAttention) {
  for (const char* pass : {"", "pass=backward "}) {
    const std::string tokens = std::string(pass) + "b=3 sk=150 hkv=2 d=64 kv=varlen tk=300 length=16 stride=8 ";
    expect_contained("nsa_pool " + tokens + "dtype=bf16");
    expect_contained("nsa_pool " + tokens + "dtype=bf16 project");
    expect_contained("nsa_gate " + std::string(pass) + "b=3 sq=90 layout=varlen tq=200 hq=4 d=64 dtype=bf16");
  }
  const std::string common = "nsa_select b=3 sq=90 sk=150 layout=varlen tq=200 tk=300 hq=4 hkv=2 d=64 dtype=bf16 ";
  expect_contained(common + "length=8 tile=16 top=9 causal");
  expect_contained(common + "length=8 tile=16 top=9 compressed_top=5 compressed_block=4 causal");
  expect_contained(common +
                   "length=8 stride=4 block=16 tile=8 top=9 score=softmax compressed_top=5 compressed_block=4");
  expect_contained(common + "length=8 stride=4 block=16 tile=8 top=9 score=softmax reduce=max");
  expect_contained(
      "nsa_select b=2 sq=40 sk=150 hq=4 hkv=2 d=64 dtype=fp16 length=8 tile=16 top=9 q_offset=96,16 causal");
}

TEST_P(HostileMetadata, CacheAppend) {
  const std::string common = "kv_append b=3 sq=4 sk=60 hq=4 hkv=2 d=64 dtype=bf16 rotary=half:32 rotate_q ";
  expect_contained(common + "kv=table page=16 pages=12");
  expect_contained(common + "kv=csr page=8 pages=24");
  expect_contained(common + "kv=dense");
  expect_contained(common + "kv=table page=7 pages=27 layout=varlen tq=9");
}

TEST_P(HostileMetadata, SlotsOfStates) {
  for (const char* layout : {"layout=vk", "layout=kv state=bf16"}) {
    const std::string common = std::string("linear_decode b=5 h=2 d=64 dtype=bf16 slots=7 ") + layout;
    expect_contained(common + " state_slots=4,-1,0,6,2");
    expect_contained(common + " t=3 state_slots=4,3,0,6,2 dest_slots=4,3,-1,1,2 slot_ids=int64");
    expect_contained(common + " ring=5 state_slots=4,-1,0,6,2 ring_cursors=0,3,5,6,11");
    expect_contained(common + " t=3 ring=4 state_slots=4,3,0,6,2 ring_cursors=0,1,4,9,5 slot_ids=int64");
    expect_contained(common + " t=0 ring=4 state_slots=4,-1,0,6,2");
  }
}

TEST_P(HostileMetadata, SequencesFromSlots) {
  const std::string common = "linear_chunk b=5 t=70 h=2 d=64 dtype=bf16 slots=7 ";
  expect_contained(common + "state_slots=4,-1,0,6,2 dest_slots=4,3,-1,1,2 slot_ids=int64");
  expect_contained(common + "varlen tq=200 layout=kv state_slots=4,3,0,6,2");
  expect_contained(
      "linear_chunk pass=backward b=5 t=70 h=2 d=64 dtype=bf16 varlen tq=200 slots=7 state_slots=4,-1,0,6,2");
}

}  // namespace
}  // namespace tessera::test
