// SPDX-License-Identifier: Apache-2.0
#include "tessera/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "base/dlpack.h"
#include "expect_error.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(ErrorText, NamesArgumentGotAndWant) {
  const Error error(ErrorCode::out_of_range, "k", "7", "less");
  EXPECT_STREQ(error.what(), "k: got 7; want less");
  EXPECT_EQ(error.code(), ErrorCode::out_of_range);
  EXPECT_EQ(error.argument(), "k");
  EXPECT_EQ(error.got(), "7");
  EXPECT_EQ(error.want(), "less");
}

TEST(ErrorText, EveryCodeHasItsOwnName) {
  std::vector<std::string_view> names;
  for (int code = 1; code <= 7; ++code) {
    const std::string_view name = to_string(static_cast<ErrorCode>(code));
    EXPECT_NE(name, "unknown error");
    for (const std::string_view other : names) EXPECT_NE(name, other);
    names.push_back(name);
  }
  EXPECT_EQ(to_string(static_cast<ErrorCode>(99)), "unknown error");
}

TEST(DTypeNames, RoundTrip) {
  for (int i = 0; i <= static_cast<int>(DType::uint64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
    EXPECT_GT(size_of(dtype), 0U);
  }
  EXPECT_EQ(size_of(DType::fp64), 8U);
  EXPECT_EQ(size_of(DType::bf16), 2U);
  EXPECT_EQ(size_of(DType::e4m3), 1U);
  expect_error([] { parse_dtype("float", "q_type"); }, ErrorCode::parse, "q_type");
}

TEST(TensorShape, ContiguousStridesAreRowMajor) {
  int data = 0;
  const Tensor t = Tensor::contiguous(&data, DType::int32, {2, 3, 4});
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.strides[0], 12);
  EXPECT_EQ(t.strides[1], 4);
  EXPECT_EQ(t.strides[2], 1);
  EXPECT_EQ(t.numel(), 24);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.describe(), "int32 (2, 3, 4) on cpu");
  EXPECT_EQ(t.as<int>(), &data);
}

TEST(TensorShape, UnboundIsFalse) {
  const Tensor t;
  EXPECT_FALSE(t);
  EXPECT_EQ(t.numel(), 0);
  EXPECT_EQ(t.describe(), "unbound");
}

TEST(TensorShape, ScalarAndEmpty) {
  const Tensor scalar = Tensor::contiguous(nullptr, DType::fp32, {});
  EXPECT_TRUE(scalar);
  EXPECT_EQ(scalar.numel(), 1);
  const Tensor empty = Tensor::contiguous(nullptr, DType::fp32, {3, 0, 5});
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_TRUE(empty.is_contiguous());
}

TEST(TensorShape, ByteOffsetMovesTheFirstElement) {
  float data[4] = {};
  Tensor t = Tensor::contiguous(data, DType::fp32, {2});
  t.byte_offset = 8;
  EXPECT_EQ(t.as<float>(), data + 2);
}

TEST(TensorShape, StridedKeepsStrides) {
  const Tensor t = Tensor::strided(nullptr, DType::bf16, {2, 3}, {1, 2}, {DeviceType::cuda, 3});
  EXPECT_FALSE(t.is_contiguous());
  EXPECT_EQ(t.describe(), "bf16 (2, 3) strides (1, 2) on cuda:3");
  // A stride beside a size of 1 does not matter.
  EXPECT_TRUE(Tensor::strided(nullptr, DType::bf16, {1, 3}, {77, 1}).is_contiguous());
}

TEST(TensorShape, RefusesBadShapes) {
  expect_error([] { Tensor::contiguous(nullptr, DType::fp32, {1, -1}); }, ErrorCode::invalid_argument, "shape");
  expect_error(
      [] {
        Tensor::contiguous(nullptr, DType::fp32, {1, 1, 1, 1, 1, 1, 1});
      },
      ErrorCode::invalid_argument, "shape");
  expect_error([] { Tensor::contiguous(nullptr, DType::fp32, {kMax / 2, 3}); }, ErrorCode::overflow, "shape");
  expect_error([] { Tensor::contiguous(nullptr, DType::fp64, {kMax / 4}); }, ErrorCode::overflow, "shape");
  expect_error([] { Tensor::contiguous(nullptr, DType::int8, {0, kMax, kMax}); }, ErrorCode::overflow, "shape");
  expect_error([] { Tensor::strided(nullptr, DType::fp32, {2, 2}, {1}); }, ErrorCode::invalid_argument, "strides");
}

TEST(TensorShape, NumelOfAForgedShapeOverflows) {
  Tensor t = Tensor::contiguous(nullptr, DType::int8, {1, 1});
  t.shape = {kMax, 2, 0, 0, 0, 0};
  expect_error([&] { (void)t.numel(); }, ErrorCode::overflow, "shape");
  t.strides = {2, 1, 0, 0, 0, 0};
  EXPECT_FALSE(t.is_contiguous());
}

class Dlpack : public testing::Test {
 protected:
  float data_[12] = {};
  std::int64_t shape_[2] = {3, 4};
  std::int64_t strides_[2] = {1, 3};
  DLTensor source_{data_, {detail::kDlCpu, 0}, 2, {detail::kDlFloat, 32, 1}, shape_, nullptr, 0};
};

TEST_F(Dlpack, EveryTypeRoundTrips) {
  for (int i = 0; i <= static_cast<int>(DType::uint64); ++i) {
    const Tensor t = Tensor::contiguous(data_, static_cast<DType>(i), {3, 4}, {DeviceType::cuda, 1});
    DLTensor out{};
    t.to_dlpack(out);
    const Tensor back = Tensor::from_dlpack(out);
    EXPECT_EQ(back.dtype, t.dtype);
    EXPECT_EQ(back.device, t.device);
    EXPECT_EQ(back.shape, t.shape);
    EXPECT_EQ(back.strides, t.strides);
    EXPECT_EQ(back.data, t.data);
  }
}

TEST_F(Dlpack, CodesAreThoseOfTheStandard) {
  DLTensor out{};
  Tensor::contiguous(data_, DType::bf16, {1}).to_dlpack(out);
  EXPECT_EQ(out.dtype.code, 4);
  EXPECT_EQ(out.dtype.bits, 16);
  Tensor::contiguous(data_, DType::e4m3, {1}).to_dlpack(out);
  EXPECT_EQ(out.dtype.code, 10);
  Tensor::contiguous(data_, DType::e5m2, {1}).to_dlpack(out);
  EXPECT_EQ(out.dtype.code, 12);
  EXPECT_EQ(out.device.device_type, 1);
}

TEST_F(Dlpack, NullStridesAreRowMajor) {
  const Tensor t = Tensor::from_dlpack(source_);
  EXPECT_EQ(t.strides[0], 4);
  EXPECT_EQ(t.strides[1], 1);
}

TEST_F(Dlpack, StridesAndOffsetAreKept) {
  source_.strides = strides_;
  source_.byte_offset = 4;
  const Tensor t = Tensor::from_dlpack(source_);
  EXPECT_EQ(t.strides[0], 1);
  EXPECT_EQ(t.strides[1], 3);
  EXPECT_EQ(t.as<float>(), data_ + 1);
}

TEST_F(Dlpack, PageLockedHostMemoryIsTheCpus) {
  source_.device = {detail::kDlCudaHost, 0};
  EXPECT_EQ(Tensor::from_dlpack(source_).device.type, DeviceType::cpu);
}

TEST_F(Dlpack, RefusesWhatItCannotHold) {
  const auto refused = [this](auto change, ErrorCode code) {
    DLTensor bad = source_;
    change(bad);
    expect_error([&] { Tensor::from_dlpack(bad, "k"); }, code, "k");
  };
  refused([](DLTensor& t) { t.dtype.lanes = 4; }, ErrorCode::invalid_argument);
  refused([](DLTensor& t) { t.dtype.code = 5; }, ErrorCode::invalid_argument);  // complex
  refused([](DLTensor& t) { t.dtype.bits = 128; }, ErrorCode::invalid_argument);
  refused([](DLTensor& t) { t.device.device_type = 10; }, ErrorCode::invalid_argument);  // ROCm
  refused([](DLTensor& t) { t.ndim = 7; }, ErrorCode::invalid_argument);
  refused([](DLTensor& t) { t.ndim = -1; }, ErrorCode::invalid_argument);
  refused([](DLTensor& t) { t.shape = nullptr; }, ErrorCode::invalid_argument);
  refused([](DLTensor& t) { t.byte_offset = ~std::uint64_t{0}; }, ErrorCode::overflow);
  shape_[0] = -3;
  refused([](DLTensor&) {}, ErrorCode::invalid_argument);
  shape_[0] = kMax;
  refused([](DLTensor&) {}, ErrorCode::overflow);
}

TEST_F(Dlpack, AnUnboundTensorHasNoForm) {
  DLTensor out{};
  expect_error([&] { Tensor().to_dlpack(out); }, ErrorCode::invalid_argument, "tensor");
}

}  // namespace
}  // namespace tessera
