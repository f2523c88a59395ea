// SPDX-License-Identifier: Apache-2.0
// Conversions of e4m3, e5m2 and int8, each implementation against values of ml_dtypes.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "base/float8.h"
#include "base/half.h"
#include "cpu/reference/number.h"
#include "cpu/simd/kernels.h"
#include "float8_values.h"

namespace tessera {
namespace {

constexpr int kBytes = 256;

float wanted(DType dtype, int byte) {
  const std::uint32_t* table = dtype == DType::e4m3 ? kE4m3 : kE5m2;
  const float magnitude = std::bit_cast<float>(table[byte & 0x7F]);
  return byte < 0x80 ? magnitude : -magnitude;
}

void expect_bits(float got, float want, int byte) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << byte;
  } else {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(want)) << byte;
  }
}

TEST(Float8, EveryByteIsTheNumberOfMlDtypes) {
  for (int byte = 0; byte < kBytes; ++byte) {
    const auto bits = static_cast<std::uint8_t>(byte);
    expect_bits(detail::from_e4m3(bits), wanted(DType::e4m3, byte), byte);
    expect_bits(detail::from_e5m2(bits), wanted(DType::e5m2, byte), byte);
    for (const DType dtype : {DType::e4m3, DType::e5m2}) {
      expect_bits(static_cast<float>(reference::float8_to_double(dtype, bits)), wanted(dtype, byte), byte);
    }
  }
}

TEST(Float8, EveryInstructionSetLoadsEveryByte) {
  std::array<std::uint8_t, kBytes> bytes{};
  for (int byte = 0; byte < kBytes; ++byte) bytes[static_cast<std::size_t>(byte)] = static_cast<std::uint8_t>(byte);
  for (const std::string& isa : cpu::usable_isas()) {
    SCOPED_TRACE(isa);
    for (const DType dtype : {DType::e4m3, DType::e5m2, DType::int8}) {
      for (const int count : {kBytes, kBytes - 3}) {  // with a rest
        std::vector<float> row(kBytes + 16, 7.0F);
        cpu::kernels_for(isa).load_row(dtype, reinterpret_cast<const std::byte*>(bytes.data()), count, 1.0F, row.data(),
                                       kBytes);
        for (int byte = 0; byte < count; ++byte) {
          const float number = static_cast<std::int8_t>(static_cast<std::uint8_t>(byte));
          expect_bits(row[static_cast<std::size_t>(byte)], dtype == DType::int8 ? number : wanted(dtype, byte), byte);
        }
        for (int byte = count; byte < kBytes; ++byte) EXPECT_EQ(row[static_cast<std::size_t>(byte)], 0.0F);
      }
    }
  }
}

std::uint8_t encoded(DType dtype, float value, bool oracle) {
  if (oracle) return reference::double_to_float8(dtype, static_cast<double>(value));
  return dtype == DType::e4m3 ? detail::to_e4m3(value) : detail::to_e5m2(value);
}

std::uint64_t hash(DType dtype, const std::vector<float>& values, bool oracle) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const float value : values) hash = (hash ^ encoded(dtype, value, oracle)) * 0x100000001b3U;
  return hash;
}

/// Numbers between neighbours of the type, exactly or one step beside.
std::vector<float> ties(DType dtype) {
  const int last = dtype == DType::e4m3 ? 0x7E : 0x7B;
  std::vector<float> values;
  for (int byte = 0; byte <= last; ++byte) {
    const double here = static_cast<double>(wanted(dtype, byte));
    const double step = byte < last ? static_cast<double>(wanted(dtype, byte + 1)) - here
                                    : here - static_cast<double>(wanted(dtype, byte - 1));
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(here + step / 2));
    for (const std::uint32_t near : {bits - 1, bits, bits + 1}) values.push_back(std::bit_cast<float>(near));
  }
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) values.push_back(-values[i]);
  return values;
}

TEST(Float8, NumbersBecomeTheBytesOfMlDtypes) {
  std::vector<float> bf16, fp16;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16.push_back(detail::from_bf16(static_cast<std::uint16_t>(bits)));
    fp16.push_back(detail::from_fp16(static_cast<std::uint16_t>(bits)));
  }
  for (const bool oracle : {false, true}) {
    for (const DType dtype : {DType::e4m3, DType::e5m2}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + (oracle ? " by the oracle" : ""));
      const EncodedHashes& want = dtype == DType::e4m3 ? kEncodedE4m3 : kEncodedE5m2;
      EXPECT_EQ(hash(dtype, bf16, oracle), want.of_bf16);
      EXPECT_EQ(hash(dtype, fp16, oracle), want.of_fp16);
      EXPECT_EQ(hash(dtype, ties(dtype), oracle), want.of_ties);
    }
  }
}

}  // namespace
}  // namespace tessera
