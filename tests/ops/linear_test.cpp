// SPDX-License-Identifier: Apache-2.0
// What linear_decode must have beyond the case files: steps of several tokens are single steps, tokens in a packed
// tensor, a sequence that two others continue, and a pool longer than 32 bits can address.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/random_floats.h"
#include "tessera/executor.h"

namespace tessera {
namespace {

void run(const std::string& line, const Bindings& bindings) {
  Executor(make_plan(Problem::parse(line), Target::cpu(1))).run(bindings);
}

class EachLayout : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Linear, EachLayout, testing::Values("vk", "kv"));

TEST_P(EachLayout, EightTokensAreEightSteps) {
  constexpr std::int64_t kTokens = 8, kHeads = 2, kDim = 64;
  Floats q = random_floats(1, kTokens * kHeads * kDim), k = random_floats(2, kTokens * kHeads * kDim),
         v = random_floats(3, kTokens * kHeads * kDim), together(q.size()), apart(q.size());
  const Floats start = random_floats(4, kHeads * kDim * kDim);
  Floats slopes{0.0F, 0.3F};
  const auto bind = [&](std::int64_t first, std::int64_t tokens, Floats& o, Floats& state) {
    Bindings bindings;
    const auto rows = [&](Slot slot, Floats& of) {
      bindings[slot] = Tensor::contiguous(of.data() + first * kHeads * kDim, DType::fp32, {1, tokens, kHeads, kDim});
    };
    rows(Slot::q, q);
    rows(Slot::k, k);
    rows(Slot::v, v);
    rows(Slot::o, o);
    bindings[Slot::state] = Tensor::contiguous(state.data(), DType::fp32, {1, kHeads, kDim, kDim});
    bindings[Slot::decay_slopes] = Tensor::contiguous(slopes.data(), DType::fp32, {kHeads});
    return bindings;
  };
  const std::string line = std::string("linear_decode h=2 layout=") + GetParam();
  Floats state = start, stepped = start;
  run(line + " t=8", bind(0, kTokens, together, state));
  for (std::int64_t t = 0; t < kTokens; ++t) run(line, bind(t, 1, apart, stepped));
  EXPECT_EQ(together, apart);
  EXPECT_EQ(state, stepped);
  EXPECT_NE(state, start);
}

TEST_P(EachLayout, TokensInsideAPackedTensor) {
  constexpr std::int64_t kBatch = 2, kTokens = 3, kHeads = 2, kDim = 32;
  constexpr std::int64_t kRow = kHeads * kDim;
  Floats packed = random_floats(5, kBatch * kTokens * 3 * kRow);
  Floats state = random_floats(6, kBatch * kHeads * kDim * kDim), same = state;
  Floats o(static_cast<std::size_t>(kBatch * kTokens * kRow)), expected = o;
  Floats slopes{0.1F, 0.2F};
  Bindings views, copies;
  std::vector<Floats> own;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v}) {
    const std::int64_t part = static_cast<std::int64_t>(own.size()) * kRow;
    Floats& copy = own.emplace_back();
    for (std::int64_t token = 0; token < kBatch * kTokens; ++token) {
      const auto from = packed.begin() + token * 3 * kRow + part;
      copy.insert(copy.end(), from, from + kRow);
    }
    views[slot] = Tensor::strided(packed.data() + part, DType::fp32, {kBatch, kTokens, kHeads, kDim},
                                  {kTokens * 3 * kRow, 3 * kRow, kDim, 1});
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    const Slot slot = i == 0 ? Slot::q : i == 1 ? Slot::k : Slot::v;
    copies[slot] = Tensor::contiguous(own[i].data(), DType::fp32, {kBatch, kTokens, kHeads, kDim});
  }
  const auto finish = [&](Bindings& bindings, Floats& states, Floats& result) {
    bindings[Slot::state] = Tensor::contiguous(states.data(), DType::fp32, {kBatch, kHeads, kDim, kDim});
    bindings[Slot::o] = Tensor::contiguous(result.data(), DType::fp32, {kBatch, kTokens, kHeads, kDim});
    bindings[Slot::decay_slopes] = Tensor::contiguous(slopes.data(), DType::fp32, {kHeads});
  };
  finish(views, state, o);
  finish(copies, same, expected);
  const std::string line = std::string("linear_decode b=2 t=3 h=2 d=32 layout=") + GetParam();
  run(line, views);
  run(line, copies);
  EXPECT_EQ(o, expected);
  EXPECT_EQ(state, same);
}

/// Memory that costs nothing until it is touched.
class Reservation {
 public:
  explicit Reservation(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (*this) munmap(data_, bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  explicit operator bool() const { return data_ != MAP_FAILED; }
  [[nodiscard]] float* data() const { return static_cast<float*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

// q, k, v and o of one sequence, token and head.
Bindings one_token(const std::array<Floats*, 4>& tensors) {
  constexpr Slot kSlots[] = {Slot::q, Slot::k, Slot::v, Slot::o};
  Bindings bindings;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto dim = static_cast<std::int64_t>(tensors[i]->size());
    bindings[kSlots[i]] = Tensor::contiguous(tensors[i]->data(), DType::fp32, {1, 1, 1, dim});
  }
  return bindings;
}

TEST_P(EachLayout, SlotTimesStrideBeyond32Bits) {
  constexpr std::int64_t kDim = 8, kStride = (std::int64_t{1} << 30) + 8, kSlots = 5;  // slot 4 begins past 2^32
  const Reservation pool(static_cast<std::size_t>((kSlots - 1) * kStride + kDim * kDim) * sizeof(float));
  if (!pool) GTEST_SKIP() << "no 16 GiB of addresses";
  Floats q = random_floats(7, kDim), k = random_floats(8, kDim), v = random_floats(9, kDim), slopes{0.0F};
  Floats o(static_cast<std::size_t>(kDim));
  std::vector<std::int64_t> slots{4};
  Bindings bindings = one_token({&q, &k, &v, &o});
  bindings[Slot::state] =
      Tensor::strided(pool.data(), DType::fp32, {kSlots, 1, kDim, kDim}, {kStride, kDim * kDim, kDim, 1});
  bindings[Slot::state_slots] = Tensor::contiguous(slots.data(), DType::int64, {1});
  bindings[Slot::decay_slopes] = Tensor::contiguous(slopes.data(), DType::fp32, {1});
  run(std::string("linear_decode d=8 slots=5 layout=") + GetParam(), bindings);
  for (std::int64_t i = 0; i < kDim; ++i) {
    for (std::int64_t j = 0; j < kDim; ++j) {
      const bool vk = std::string_view(GetParam()) == "vk";
      const float want = k[static_cast<std::size_t>(vk ? j : i)] * v[static_cast<std::size_t>(vk ? i : j)];
      EXPECT_EQ(pool.data()[4 * kStride + i * kDim + j], want);
    }
  }
  for (std::int64_t slot = 0; slot < 4; ++slot) EXPECT_EQ(pool.data()[slot * kStride], 0.0F);
}

/// By hand: one key, one value, decay 1/2.
TEST_P(EachLayout, TheRecurrence) {
  constexpr std::int64_t kDim = 8;
  Floats q(kDim, 0.0F), k(kDim, 0.0F), v(kDim, 0.0F), o(kDim), state(kDim * kDim, 0.0F);
  Floats slopes{std::log(2.0F)};
  const bool vk = std::string_view(GetParam()) == "vk";
  const auto at = [&](std::size_t key, std::size_t value) -> float& {
    return state[vk ? value * kDim + key : key * kDim + value];
  };
  at(2, 5) = 4.0F;
  q[2] = 3.0F;
  k[2] = 10.0F;
  v[5] = 0.5F;
  v[6] = 1.0F;
  Bindings bindings = one_token({&q, &k, &v, &o});
  bindings[Slot::state] = Tensor::contiguous(state.data(), DType::fp32, {1, 1, kDim, kDim});
  bindings[Slot::decay_slopes] = Tensor::contiguous(slopes.data(), DType::fp32, {1});
  run(std::string("linear_decode d=8 scale=2 layout=") + GetParam(), bindings);
  EXPECT_NEAR(at(2, 5), 7.0F, 1e-6F);   // 4 / 2 + 10 · 0.5
  EXPECT_NEAR(at(2, 6), 10.0F, 1e-6F);  // 0 / 2 + 10 · 1
  EXPECT_NEAR(o[5], 42.0F, 1e-5F);      // 2 · 3 · 7: the new state
  EXPECT_NEAR(o[6], 60.0F, 1e-5F);
  EXPECT_EQ(o[0], 0.0F);
}

}  // namespace
}  // namespace tessera
