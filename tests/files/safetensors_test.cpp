// SPDX-License-Identifier: Apache-2.0
#include "files/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "file_bytes.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

using testing::bytes_of;
using testing::safetensors;
using testing::TemporaryFolder;

ErrorCode code_of(const std::string& file, std::string* text = nullptr) {
  try {
    parse_safetensors_header(bytes_of(file), "x.safetensors");
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.code();
  }
  ADD_FAILURE() << "accepted";
  return ErrorCode::internal;
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const std::string file = safetensors(
      R"({"__metadata__":{"scale":"0.125"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"none":{"dtype":"I64","shape":[0,9],"data_offsets":[4,4]},)"
      R"("flag":{"dtype":"BOOL","shape":[2],"data_offsets":[16,18]}}   )",
      18);
  const SafetensorsHeader header = parse_safetensors_header(bytes_of(file), "x");
  ASSERT_EQ(header.entries.size(), 4U);
  EXPECT_EQ(header.metadata.at("scale"), "0.125");
  const SafetensorsEntry* b = header.find("b");
  ASSERT_NE(b, nullptr);
  const Array array = copy_tensor(bytes_of(file), header, *b, "x");
  EXPECT_EQ(array.dtype(), DType::bf16);
  EXPECT_EQ(array.shape(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(array.tensor().as<std::uint16_t>()[5], 0x0101);
  EXPECT_EQ(header.find("c"), nullptr);
  try {
    copy_tensor(bytes_of(file), header, *header.find("flag"), "x");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

TEST(Safetensors, RefusesTruncatedFiles) {
  const std::string whole = safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    std::string text;
    EXPECT_EQ(code_of(whole.substr(0, length), &text), ErrorCode::parse) << length;
    const bool cut = length >= 8 && length < whole.size() - 8;  // inside the header
    EXPECT_EQ(text.find("want the whole header") != std::string::npos, cut) << length << ": " << text;
  }
  EXPECT_EQ(code_of(whole + "x"), ErrorCode::parse);
  std::string text;
  EXPECT_EQ(code_of(testing::little_endian(~0ULL, 8) + "{}", &text), ErrorCode::parse);
  EXPECT_EQ(text, "x.safetensors: got a header of 18446744073709551615 bytes; want at most 100000000");
}

TEST(Safetensors, RefusesHostileHeaders) {
  const auto one = [](const std::string& body) { return "{\"a\":{" + body + "}}"; };
  for (
      const std::string& header : std::vector<std::string>{
          "",
          "[]",
          "{",
          "{\"a\"}",
          " {}",
          "{\"a\":1}",
          "{\"\xFF\":1}",
          "{\"__metadata__\":1}",
          "{\"__metadata__\":{\"x\":1}}",
          "{\"a\":[[[[1]]]]}",
          std::string(5000, '[') + std::string(5000, ']'),
          one(R"("dtype":"F32","shape":[2])"),
          one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1)"),
          one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"shape":[2])"),
          one(R"("dtype":"F31","shape":[2],"data_offsets":[0,8])"),
          one(R"("dtype":4,"shape":[2],"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"),
          one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
          one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
          one(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"),
          one(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"),
          one(R"("dtype":"F32","shape":[3],"data_offsets":[0,12])"),
          R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
      }) {
    EXPECT_EQ(code_of(safetensors(header, 8)), ErrorCode::parse) << header.substr(0, 100);
  }
  EXPECT_EQ(code_of(safetensors(one(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8])"), 8)),
            ErrorCode::overflow);
}

TEST(Safetensors, LimitsTheRankOnlyWhenATensorIsRead) {
  const std::string file = safetensors(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1);
  const SafetensorsHeader header = parse_safetensors_header(bytes_of(file), "x");
  EXPECT_THROW(copy_tensor(bytes_of(file), header, header.entries[0], "x"), Error);
}

TEST(Safetensors, WritesWhatItReads) {
  const TemporaryFolder folder;
  const std::string path = folder.file("round.safetensors");
  const Array bytes(DType::uint8, {3});
  const Array wide(DType::fp64, {2, 2});
  const Array half(DType::bf16, {5});
  const Array none(DType::fp32, {0, 3});
  for (const Array* array : {&bytes, &wide, &half}) {
    for (std::size_t at = 0; at < array->size_bytes(); ++at) array->data()[at] = static_cast<std::byte>(at * 11 + 1);
  }
  write_safetensors(
      path, {{"bytes", bytes.tensor()}, {"wide", wide.tensor()}, {"half", half.tensor()}, {"none", none.tensor()}},
      {{"made by", "a test"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.header().metadata.at("made by"), "a test");
  EXPECT_EQ((file.header().data_offset) % 8, 0U);
  for (const auto& [name, array] : std::vector<std::pair<std::string, const Array*>>{
           {"bytes", &bytes}, {"wide", &wide}, {"half", &half}, {"none", &none}}) {
    const Array again = file.load(name);
    EXPECT_EQ(again.dtype(), array->dtype());
    EXPECT_EQ(again.shape(), array->shape());
    EXPECT_EQ(std::memcmp(again.data(), array->data(), array->size_bytes()), 0) << name;
    EXPECT_EQ(file.header().find(name)->begin % size_of(array->dtype()), 0U) << name;
  }
  EXPECT_TRUE(file.contains("wide"));
  EXPECT_THROW((void)file.load("q"), Error);
  EXPECT_EQ(folder.count(), 1U);
}

TEST(Safetensors, WritesNothingWhenItCannot) {
  const TemporaryFolder folder;
  const Array array(DType::fp32, {2});
  EXPECT_THROW(write_safetensors(folder.file("x"), {{"a", array.tensor()}, {"a", array.tensor()}}), Error);
  EXPECT_THROW(write_safetensors(folder.file("x"), {{"a", Tensor{}}}), Error);
  EXPECT_THROW(write_safetensors(folder.file("missing/x"), {{"a", array.tensor()}}), Error);
  EXPECT_EQ(folder.count(), 0U);
}

}  // namespace
}  // namespace tessera::files
