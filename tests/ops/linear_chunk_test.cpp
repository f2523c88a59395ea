// SPDX-License-Identifier: Apache-2.0
// What linear_chunk must have beyond the case files: the oracle's gradients are finite differences of its forward, a
// sequence may be cut anywhere, and decoding goes on from the states that it leaves.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cases/inputs/inputs.h"
#include "cases/line/case.h"
#include "cpu/reference/number.h"
#include "cpu/reference/reference.h"
#include "ops/random_floats.h"

namespace tessera {
namespace {

using cases::Case;
using cases::Inputs;
using reference::Arithmetic;

/// Over what is written: slack tokens are not.
double dot(const Tensor& weights, const reference::Output& output) {
  double sum = 0;
  reference::for_each_element(weights, [&](std::int64_t index, std::int64_t offset) {
    const auto at = static_cast<std::size_t>(index);
    if (output.written[at] != 0) sum += reference::read(weights, offset) * output.values[at];
  });
  return sum;
}

/// dout · O + dstate_final · (last states), whose gradients a backward gives.
double loss(const Problem& backward, const Bindings& bindings) {
  Problem forward = backward;
  forward.pass = Pass::forward;
  Bindings bound = bindings;
  bound[Slot::o] = bindings[Slot::dout];  // only its type is looked at
  std::vector<std::int64_t> destinations;
  for (std::int64_t b = 0; b < forward.batch; ++b) destinations.push_back(b);
  if (forward.linear.states > 0)
    bound[Slot::dest_slots] = Tensor::contiguous(destinations.data(), DType::int64, {forward.batch});
  const reference::Result result = reference::compute(forward, bound, Arithmetic::oracle);
  const double outputs = dot(bindings[Slot::dout], result[Slot::o]);
  const Tensor& final = bindings[Slot::dstate_final];
  return final ? outputs + dot(final, result[Slot::state]) : outputs;
}

/// Everything is linear in each of q, k, v and the states: a difference has no error but of rounding.
double slope_of_loss(const Problem& problem, const Bindings& bindings, const Tensor& tensor, std::int64_t offset) {
  const double value = reference::read(tensor, offset);
  reference::write(tensor, offset, value + 1);
  const double above = reference::read(tensor, offset) - value;
  const double up = loss(problem, bindings);
  reference::write(tensor, offset, value - 1);
  const double below = value - reference::read(tensor, offset);
  const double down = loss(problem, bindings);
  reference::write(tensor, offset, value);
  return (up - down) / (above + below);
}

class LinearGradients : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Forms, LinearGradients,
                         testing::Values("b=2 t=5", "b=2 t=5 slots=3", "b=3 t=4 slots=4 state_slots=2,-1,0 layout=kv",
                                         "b=3 t=6 varlen tq=13 slots=5 state_slots=4,1,-1 lens_q=6,0,3",
                                         "b=2 t=4 slots=3 state_slots=2,0 dstates=unbound slopes=zero scale=-2"));

TEST_P(LinearGradients, AreFiniteDifferencesOfTheForward) {
  Case one = Case::parse(std::string("linear_chunk pass=backward h=2 d=8 dv=16 seed=3 ") + GetParam());
  one.problem.q_type = one.problem.k_type = one.problem.v_type = one.problem.o_type = DType::fp64;
  Inputs inputs(one);
  const Bindings& bindings = inputs.bindings();
  const reference::Result result = reference::compute(one.problem, bindings, Arithmetic::oracle);
  std::int64_t compared = 0;
  for (const auto& [input, gradient] :
       {std::pair{Slot::q, Slot::dq}, std::pair{Slot::k, Slot::dk}, std::pair{Slot::v, Slot::dv}}) {
    reference::for_each_element(
        bindings[input], [&, of = input, to = gradient](std::int64_t index, std::int64_t offset) {
          const auto at = static_cast<std::size_t>(index);
          if (index % 3 != 0 || result[to].written[at] == 0) return;  // slack tokens have no gradient
          EXPECT_NEAR(slope_of_loss(one.problem, bindings, bindings[of], offset), result[to].values[at], 1e-8)
              << to_string(to) << " " << index;
          ++compared;
        });
  }
  EXPECT_GT(compared, 100);
  const Tensor& states = bindings[Slot::state];
  const Tensor& initial = bindings[Slot::dstate_initial];
  if (!initial) return;
  for (std::int64_t b = 0; b < one.problem.batch; ++b) {
    const std::int64_t source = static_cast<std::int64_t>(reference::read(bindings[Slot::state_slots], b));
    if (source < 0) continue;
    for (std::int64_t i = 0; i < initial.strides[0]; i += 7) {
      EXPECT_NEAR(slope_of_loss(one.problem, bindings, states, source * states.strides[0] + i),
                  result[Slot::dstate_initial].values[static_cast<std::size_t>(b * initial.strides[0] + i)], 1e-8)
          << "dstate_initial of sequence " << b << " " << i;
    }
  }
}

// ---- sequences in parts

constexpr std::int64_t kHeads = 2, kDim = 24, kDimV = 40, kTokens = 150;

/// One sequence, its outputs, and the state that it begins and ends with.
struct Sequence {
  Floats q = random_floats(1, kTokens* kHeads* kDim), k = random_floats(2, kTokens* kHeads* kDim),
         v = random_floats(3, kTokens* kHeads* kDimV), o = Floats(v.size()),
         state = random_floats(4, kHeads* kDim* kDimV), slopes{0.0F, 0.3F};

  void run(const std::string& operation, std::int64_t first, std::int64_t tokens, const std::string& words) {
    Bindings bindings;
    const auto rows = [&](Slot slot, Floats& of, std::int64_t dim) {
      bindings[slot] = Tensor::contiguous(of.data() + first * kHeads * dim, DType::fp32, {1, tokens, kHeads, dim});
    };
    rows(Slot::q, q, kDim);
    rows(Slot::k, k, kDim);
    rows(Slot::v, v, kDimV);
    rows(Slot::o, o, kDimV);
    const bool vk = words.find("layout=vk") != std::string::npos;
    bindings[Slot::state] =
        Tensor::contiguous(state.data(), DType::fp32, {1, kHeads, vk ? kDimV : kDim, vk ? kDim : kDimV});
    bindings[Slot::decay_slopes] = Tensor::contiguous(slopes.data(), DType::fp32, {kHeads});
    const std::string line = operation + " t=" + std::to_string(tokens) + " h=2 d=24 dv=40 slots=1 scale=0.1 " + words;
    Executor(make_plan(Problem::parse(line), Target::cpu(1))).run(bindings);
  }
};

void expect_close(const Floats& got, const Floats& want) {
  float largest = 0;
  float apart = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    apart = std::max(apart, std::abs(got[i] - want[i]));
  }
  EXPECT_LE(apart, 3e-6F * largest);  // a few roundings of sums of some 150 summands
}

class ChunkLayout : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Linear, ChunkLayout, testing::Values("layout=vk", "layout=kv"));

TEST_P(ChunkLayout, PartsOfASequenceAreTheWhole) {
  Sequence whole;
  const Floats start = whole.state;
  whole.run("linear_chunk", 0, kTokens, GetParam());
  EXPECT_NE(whole.state, start);
  for (const std::int64_t cut : {1, 63, 64, 100, 149}) {
    Sequence parts;
    parts.run("linear_chunk", 0, cut, GetParam());
    parts.run("linear_chunk", cut, kTokens - cut, GetParam());
    expect_close(parts.o, whole.o);
    expect_close(parts.state, whole.state);
  }
}

TEST_P(ChunkLayout, DecodingGoesOnWhereAPrefillEnds) {
  Sequence whole;
  whole.run("linear_chunk", 0, kTokens, GetParam());
  Sequence steps;
  steps.run("linear_chunk", 0, kTokens - 13, GetParam());
  for (std::int64_t t = kTokens - 13; t < kTokens - 8; ++t) steps.run("linear_decode", t, 1, GetParam());
  steps.run("linear_decode", kTokens - 8, 8, GetParam());
  expect_close(steps.o, whole.o);
  expect_close(steps.state, whole.state);
}

// A value that is not finite shows from its token on, be it the last of a chunk or of the sequence.
TEST_P(ChunkLayout, NothingOfLaterTokens) {
  Sequence clean;
  clean.run("linear_chunk", 0, kTokens, GetParam());
  for (const std::int64_t token : {0, 62, 63, 64, 127, 148, 149}) {
    Sequence non_finite;
    const auto at = static_cast<std::size_t>((token * kHeads + 1) * kDimV - 1);  // last value of the first head
    non_finite.v[at] = std::numeric_limits<float>::quiet_NaN();
    non_finite.run("linear_chunk", 0, kTokens, GetParam());
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto value = static_cast<std::size_t>((t * kHeads + 1) * kDimV - 1);
      EXPECT_EQ(std::isnan(non_finite.o[value]), t >= token) << token << " " << t;
      EXPECT_FALSE(t < token && std::abs(non_finite.o[value] - clean.o[value]) > 1e-5F) << token << " " << t;
      EXPECT_NEAR(non_finite.o[value - 1], clean.o[value - 1], 1e-5F) << token << " " << t;
    }
  }
}

TEST_P(ChunkLayout, ZeroTokensLeaveTheState) {
  Sequence none;
  const Floats start = none.state;
  none.run("linear_chunk", 0, 0, GetParam());
  EXPECT_EQ(none.state, start);
}

/// By hand: one key, one value, decay 1/2, from a state that the first token decays too.
TEST(LinearChunk, TheRecurrence) {
  constexpr std::int64_t kSmall = 8, kSteps = 3;
  Floats q(kSteps * kSmall, 0.0F), k(q), v(q), o(q), state(kSmall * kSmall, 0.0F), slopes{std::log(2.0F)};
  Bindings bindings;
  Floats* const rows[] = {&q, &k, &v, &o};
  const Slot slots[] = {Slot::q, Slot::k, Slot::v, Slot::o};
  for (std::size_t i = 0; i < 4; ++i) {
    bindings[slots[i]] = Tensor::contiguous(rows[i]->data(), DType::fp32, {1, kSteps, 1, kSmall});
  }
  bindings[Slot::state] = Tensor::contiguous(state.data(), DType::fp32, {1, 1, kSmall, kSmall});
  bindings[Slot::decay_slopes] = Tensor::contiguous(slopes.data(), DType::fp32, {1});
  state[5 * kSmall + 2] = 8.0F;  // of value 5 and key 2
  k[2] = 10.0F, v[5] = 0.5F;     // of the first token: 8 / 2 + 10 · 0.5 = 9, then 4.5, then 2.25
  for (std::size_t t = 0; t < kSteps; ++t) q[t * kSmall + 2] = 1.0F;
  Executor(make_plan(Problem::parse("linear_chunk t=3 d=8 slots=1 scale=2"), Target::cpu(1))).run(bindings);
  EXPECT_NEAR(o[5], 18.0F, 1e-5F);
  EXPECT_NEAR(o[kSmall + 5], 9.0F, 1e-5F);
  EXPECT_NEAR(o[2 * kSmall + 5], 4.5F, 1e-5F);
  EXPECT_NEAR(state[5 * kSmall + 2], 2.25F, 1e-6F);
  EXPECT_EQ(o[0], 0.0F);
}

}  // namespace
}  // namespace tessera
