// SPDX-License-Identifier: Apache-2.0
// The convenience calls, against a few lines of arithmetic.
#include "tessera/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "expect_error.h"

namespace tessera {
namespace {

struct Floats {
  std::vector<float> values;
  Tensor tensor;
  explicit Floats(std::initializer_list<std::int64_t> shape, std::uint32_t seed = 0) {
    tensor = Tensor::contiguous(nullptr, DType::fp32, shape);
    values.resize(static_cast<std::size_t>(tensor.numel()));
    tensor.data = values.data();
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    if (seed != 0) {
      for (float& value : values) value = normal(random);
    }
  }
  [[nodiscard]] float at(std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) const {
    const auto& s = tensor.strides;
    return values[static_cast<std::size_t>(i * s[0] + j * s[1] + k * s[2] + l * s[3])];
  }
};

constexpr std::int64_t kB = 2, kSq = 9, kSk = 13, kHq = 4, kHkv = 2, kD = 16, kDv = 24;

struct Inputs {
  Floats q{{kB, kSq, kHq, kD}, 1};
  Floats k{{kB, kSk, kHkv, kD}, 2};
  Floats v{{kB, kSk, kHkv, kDv}, 3};
  Floats o{{kB, kSq, kHq, kDv}};
  Floats lse{{kB, kHq, kSq}};
};

/// o and LSE of one row in double.
std::vector<double> row(const Inputs& in, const AttentionOptions& options, std::int64_t b, std::int64_t i,
                        std::int64_t h, double& lse) {
  std::vector<double> o(kDv, 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < kSk; ++j) {
    const std::int64_t distance = j - (i + kSk - kSq);
    if (options.causal && distance > 0) continue;
    if (options.window_left && distance < -*options.window_left) continue;
    if (!options.causal && options.window_right && distance > *options.window_right) continue;
    double s = 0;
    for (std::int64_t c = 0; c < kD; ++c) s += double{in.q.at(b, i, h, c)} * in.k.at(b, j, h / 2, c);
    s *= options.scale ? *options.scale : 1 / std::sqrt(double{kD});
    if (options.softcap > 0) s = options.softcap * std::tanh(s / options.softcap);
    const double p = std::exp(s);
    sum += p;
    for (std::int64_t c = 0; c < kDv; ++c) o[static_cast<std::size_t>(c)] += p * in.v.at(b, j, h / 2, c);
  }
  for (double& x : o) x = sum > 0 ? x / sum : 0.0;
  lse = std::log(sum);
  return o;
}

TEST(AttentionCall, MatchesItsDefinition) {
  std::vector<AttentionOptions> options(5);
  options[1].causal = true;
  options[1].window_right = 5;  // causal has the last word
  options[2].window_left = 3;
  options[2].window_right = 1;
  options[3].scale = 0.5F;
  options[3].softcap = 2.0F;
  options[4].threads = 1;
  for (const AttentionOptions& option : options) {
    Inputs in;
    attention(in.q.tensor, in.k.tensor, in.v.tensor, in.o.tensor, option, in.lse.tensor);
    for (std::int64_t b = 0; b < kB; ++b) {
      for (std::int64_t i = 0; i < kSq; ++i) {
        for (std::int64_t h = 0; h < kHq; ++h) {
          double lse = 0;
          const std::vector<double> want = row(in, option, b, i, h, lse);
          for (std::int64_t c = 0; c < kDv; ++c) {
            ASSERT_NEAR(in.o.at(b, i, h, c), want[static_cast<std::size_t>(c)], 2e-5);
          }
          ASSERT_NEAR(in.lse.values[static_cast<std::size_t>((b * kHq + h) * kSq + i)], lse, 2e-5);
        }
      }
    }
  }
}

TEST(AttentionCall, BackwardIsTheDerivative) {
  Inputs in;
  AttentionOptions options;
  options.causal = true;
  const Floats dout({kB, kSq, kHq, kDv}, 4);
  Floats dq({kB, kSq, kHq, kD}), dk({kB, kSk, kHkv, kD}), dv({kB, kSk, kHkv, kDv});
  attention(in.q.tensor, in.k.tensor, in.v.tensor, in.o.tensor, options, in.lse.tensor);
  attention_backward(in.q.tensor, in.k.tensor, in.v.tensor, in.o.tensor, in.lse.tensor, dout.tensor, dq.tensor,
                     dk.tensor, dv.tensor, options);
  const auto loss = [&] {
    double sum = 0;
    for (std::int64_t b = 0; b < kB; ++b) {
      for (std::int64_t i = 0; i < kSq; ++i) {
        for (std::int64_t h = 0; h < kHq; ++h) {
          double lse = 0;
          const std::vector<double> o = row(in, options, b, i, h, lse);
          for (std::int64_t c = 0; c < kDv; ++c) sum += o[static_cast<std::size_t>(c)] * dout.at(b, i, h, c);
        }
      }
    }
    return sum;
  };
  const auto expect_slope = [&](Floats& input, const Floats& gradient, std::size_t at) {
    const float kept = input.values[at];
    const float step = 1.0F / 1024;
    input.values[at] = kept + step;
    const double above = loss();
    input.values[at] = kept - step;
    const double below = loss();
    input.values[at] = kept;
    EXPECT_NEAR(gradient.values[at], (above - below) / (2 * step), 2e-3);
  };
  for (const std::size_t at : {0U, 37U, 200U}) {
    expect_slope(in.q, dq, at);
    expect_slope(in.k, dk, at);
    expect_slope(in.v, dv, at);
  }
}

/// Keys in two halves, merged, are the whole.
TEST(MergeStates, HalvesMakeTheWhole) {
  Inputs in;
  attention(in.q.tensor, in.k.tensor, in.v.tensor, in.o.tensor, {}, in.lse.tensor);
  const std::int64_t cut = 5;
  Floats o_a({kB, kSq, kHq, kDv}), o_b({kB, kSq, kHq, kDv}), lse_a({kB, kHq, kSq}), lse_b({kB, kHq, kSq});
  const auto half = [&](std::int64_t begin, std::int64_t end, const Floats& o, const Floats& lse) {
    Tensor k = in.k.tensor;
    Tensor v = in.v.tensor;
    k.shape[1] = v.shape[1] = end - begin;
    k.byte_offset = begin * k.strides[1] * 4;
    v.byte_offset = begin * v.strides[1] * 4;
    attention(in.q.tensor, k, v, o.tensor, {}, lse.tensor);
  };
  half(0, cut, o_a, lse_a);
  half(cut, kSk, o_b, lse_b);
  Floats o({kB, kSq, kHq, kDv}), lse({kB, kHq, kSq});
  const auto expect_whole = [&](const Floats& got_o, const Floats& got_lse) {
    for (std::size_t i = 0; i < in.o.values.size(); ++i) ASSERT_NEAR(got_o.values[i], in.o.values[i], 2e-5);
    for (std::size_t i = 0; i < in.lse.values.size(); ++i) ASSERT_NEAR(got_lse.values[i], in.lse.values[i], 2e-5);
  };
  merge_states(o_a.tensor, lse_a.tensor, o_b.tensor, lse_b.tensor, o.tensor, lse.tensor);
  expect_whole(o, lse);
  // In place of the first.
  merge_states(o_a.tensor, lse_a.tensor, o_b.tensor, lse_b.tensor, o_a.tensor, lse_a.tensor);
  expect_whole(o_a, lse_a);
}

TEST(MergeStates, EmptyIsNeutral) {
  Floats o_a({1, 2, 1, 8}, 5), o_b({1, 2, 1, 8}), lse_a({1, 1, 2}, 6), lse_b({1, 1, 2}), o({1, 2, 1, 8}),
      lse({1, 1, 2});
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  lse_b.values = {minus_infinity, minus_infinity};
  lse_a.values[1] = minus_infinity;
  merge_states(o_b.tensor, lse_b.tensor, o_a.tensor, lse_a.tensor, o.tensor, lse.tensor);
  for (std::size_t c = 0; c < 8; ++c) {
    EXPECT_FLOAT_EQ(o.values[c], o_a.values[c]);
    EXPECT_EQ(o.values[8 + c], 0.0F);
  }
  EXPECT_FLOAT_EQ(lse.values[0], lse_a.values[0]);
  EXPECT_EQ(lse.values[1], minus_infinity);
}

TEST(AttentionCall, RefusesBadTensors) {
  Inputs in;
  const auto run = [&] { attention(in.q.tensor, in.k.tensor, in.v.tensor, in.o.tensor); };
  const auto refused = [&](Floats& which, auto change, const char* argument) {
    const Tensor kept = which.tensor;
    change(which.tensor);
    expect_error(run, ErrorCode::invalid_argument, argument);
    which.tensor = kept;
  };
  refused(
      in.q, [](Tensor& t) { t.rank = 3; }, "q");
  refused(
      in.k, [](Tensor& t) { t = {}; }, "k");
  refused(
      in.k, [](Tensor& t) { t.shape[0] = 1; }, "k");
  refused(
      in.k, [](Tensor& t) { t.shape[2] = 3; }, "heads_kv");
  refused(
      in.v, [](Tensor& t) { t.shape[1] = kSk - 1; }, "v");
  refused(
      in.o, [](Tensor& t) { t.dtype = DType::int32; }, "o_type");
  refused(
      in.o, [](Tensor& t) { t.shape[3] = 8; }, "o");
  EXPECT_EQ(in.o.values, std::vector<float>(in.o.values.size(), 0.0F));
}

TEST(MergeStates, RefusesPartsThatDiffer) {
  Floats a({1, 2, 3, 8}), b({1, 2, 3, 8}), lse_a({1, 3, 2}), lse_b({1, 3, 2}), o({1, 2, 3, 8}), lse({1, 3, 2});
  const auto merge = [&](const Tensor& o_b, const Tensor& l_a, const Tensor& l_b) {
    merge_states(a.tensor, l_a, o_b, l_b, o.tensor, lse.tensor);
  };
  Tensor other = b.tensor;
  other.shape[1] = 1;
  expect_error([&] { merge(other, lse_a.tensor, lse_b.tensor); }, ErrorCode::invalid_argument, "o_b");
  other = b.tensor;
  std::swap(other.strides[0], other.strides[1]);
  expect_error([&] { merge(other, lse_a.tensor, lse_b.tensor); }, ErrorCode::invalid_argument, "o_b");
  other = b.tensor;
  other.byte_offset = 1;
  expect_error([&] { merge(other, lse_a.tensor, lse_b.tensor); }, ErrorCode::invalid_argument, "o_b");
  other = lse_b.tensor;
  other.dtype = DType::bf16;
  expect_error([&] { merge(b.tensor, lse_a.tensor, other); }, ErrorCode::invalid_argument, "lse_b");
  expect_error([&] { merge(b.tensor, {}, lse_b.tensor); }, ErrorCode::invalid_argument, "lse_a");
}

}  // namespace
}  // namespace tessera
