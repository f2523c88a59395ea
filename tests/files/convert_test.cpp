// SPDX-License-Identifier: Apache-2.0
#include "files/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "files/array.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

TEST(Convert, EveryHalfSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float as_fp16 = from_fp16(half);
    const float as_bf16 = from_bf16(half);
    if (std::isnan(as_fp16)) {
      EXPECT_TRUE(std::isnan(from_fp16(to_fp16(as_fp16))));
    } else {
      EXPECT_EQ(to_fp16(as_fp16), half);
    }
    if (std::isnan(as_bf16)) {
      EXPECT_TRUE(std::isnan(from_bf16(to_bf16(as_bf16))));
    } else {
      EXPECT_EQ(to_bf16(as_bf16), half);
    }
  }
}

TEST(Convert, RoundsToNearestEven) {
  EXPECT_EQ(from_fp16(to_fp16(1.0F + 0x1p-11F)), 1.0F);                // half way, to even
  EXPECT_EQ(from_fp16(to_fp16(1.0F + 3 * 0x1p-11F)), 1.0F + 0x1p-9F);  // half way, to even
  EXPECT_EQ(from_fp16(to_fp16(2047.9F)), 2048.0F);                     // carries into the exponent
  EXPECT_EQ(from_fp16(to_fp16(65519.0F)), 65504.0F);
  for (const float large : {65520.0F, 65536.0F, 7e4F, 1e5F, 3e38F}) {
    EXPECT_EQ(to_fp16(large), 0x7C00) << large;
    EXPECT_EQ(to_fp16(-large), 0xFC00) << large;
  }
  EXPECT_EQ(from_fp16(to_fp16(0x1p-25F)), 0.0F);
  EXPECT_EQ(from_fp16(to_fp16(-0x1.8p-25F)), -0x1p-24F);
  EXPECT_EQ(from_bf16(to_bf16(1.0F + 0x1p-8F)), 1.0F);
  EXPECT_EQ(from_bf16(to_bf16(1.0F + 3 * 0x1p-8F)), 1.0F + 0x1p-6F);
  EXPECT_TRUE(std::isinf(from_bf16(to_bf16(3.4e38F))));
}

TEST(Convert, ReadsAndStoresByType) {
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16, DType::e4m3, DType::e5m2}) {
    const Array array(dtype, {2, 2});
    for (std::int64_t at = 0; at < 4; ++at) store_float(array.tensor(), at, static_cast<float>(at) - 1.5F);
    EXPECT_EQ(to_floats(array.tensor()), (std::vector<float>{-1.5F, -0.5F, 0.5F, 1.5F}));
  }
  const Array bytes(DType::int8, {3});
  for (std::int64_t at = 0; at < 3; ++at) store_float(bytes.tensor(), at, 100.5F * static_cast<float>(at) - 50.5F);
  EXPECT_EQ(to_floats(bytes.tensor()), (std::vector<float>{-50.0F, 50.0F, 127.0F}));
  store_float(bytes.tensor(), 1, NAN);
  EXPECT_EQ(to_floats(bytes.tensor()), (std::vector<float>{-50.0F, 0.0F, 127.0F}));
  const Array doubles(DType::fp64, {1});
  doubles.tensor().as<double>()[0] = 0.25;
  EXPECT_EQ(to_floats(doubles.tensor()), std::vector<float>{0.25F});
  const Array integers(DType::int32, {1});
  EXPECT_THROW(to_floats(integers.tensor()), Error);
  EXPECT_THROW(store_float(integers.tensor(), 0, 1.0F), Error);
}

TEST(Array, ChecksItsShape) {
  EXPECT_THROW(Array(DType::fp32, {-1}), Error);
  EXPECT_THROW(Array(DType::fp32, {1, 1, 1, 1, 1, 1, 1}), Error);
  try {
    Array(DType::fp32, {1LL << 40, 1LL << 40}, "q");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::overflow);
    EXPECT_EQ(error.argument(), "q");
  }
  EXPECT_EQ(std::bit_cast<std::uintptr_t>(Array(DType::uint8, {3}).data()) % 64, 0U);
}

}  // namespace
}  // namespace tessera::files
