// SPDX-License-Identifier: Apache-2.0
#include "files/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "file_bytes.h"
#include "files/bytes.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

using testing::bytes_of;
using testing::npy;
using testing::TemporaryFolder;

ErrorCode code_of(const std::string& file, std::string* text = nullptr) {
  try {
    parse_npy(bytes_of(file), "x.npy");
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.code();
  }
  ADD_FAILURE() << "accepted";
  return ErrorCode::internal;
}

TEST(Npy, ReadsWhatNumpyWrites) {
  const std::string header =
      "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }                                                    "
      "\n";
  std::string file = npy(header, 0);
  const std::vector<float> values{1.0F, -2.5F, 3.0F, 0.0F, 5.0F, 6.25F};
  file.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  const Array array = parse_npy(bytes_of(file), "x.npy");
  EXPECT_EQ(array.dtype(), DType::fp32);
  EXPECT_EQ(array.shape(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(array.data(), values.data(), array.size_bytes()), 0);
}

TEST(Npy, TypesShapesAndVersions) {
  struct Row {
    const char* descr;
    DType dtype;
  };
  for (const Row& row : std::vector<Row>{{"<f2", DType::fp16},
                                         {"<f8", DType::fp64},
                                         {"<V2", DType::bf16},
                                         {"|V2", DType::bf16},
                                         {"bfloat16", DType::bf16},
                                         {"<i4", DType::int32},
                                         {"<i8", DType::int64},
                                         {"<u4", DType::uint32},
                                         {"<u8", DType::uint64},
                                         {"|u1", DType::uint8},
                                         {"|i1", DType::int8}}) {
    const std::string header = "{\"shape\": (3,), 'descr': '" + std::string(row.descr) + "', 'fortran_order': True}\n";
    for (int major = 1; major <= 3; ++major) {
      const std::string file = npy(header, 3 * size_of(row.dtype), major);
      const NpyHeader read = parse_npy_header(bytes_of(file), "x.npy");
      EXPECT_EQ(read.dtype, row.dtype) << row.descr;
      EXPECT_EQ(read.shape, std::vector<std::int64_t>{3});
    }
  }
  EXPECT_EQ(parse_npy(bytes_of(npy("{'descr':'<f4','fortran_order':False,'shape':()}", 4)), "s").size_bytes(), 4U);
  EXPECT_EQ(parse_npy(bytes_of(npy("{'descr':'<f4','fortran_order':False,'shape':(0,7)}", 0)), "s").size_bytes(), 0U);
}

TEST(Npy, RefusesWhatIsNotOne) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}";
  std::string text;
  EXPECT_EQ(code_of(npy(good, 7), &text), ErrorCode::parse);
  EXPECT_EQ(text, "x.npy: got 7 bytes of data; want 8 for fp32 (2)");
  EXPECT_EQ(code_of(npy(good, 9)), ErrorCode::parse);
  EXPECT_EQ(code_of(npy(good, 8, 4)), ErrorCode::parse);
  EXPECT_EQ(code_of(""), ErrorCode::parse);
  EXPECT_EQ(code_of("PK\x03\x04 something else"), ErrorCode::parse);
  const std::string whole = npy(good, 8);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(code_of(whole.substr(0, length)), ErrorCode::parse) << length;
  }
  const std::string whole2 = npy(good, 8, 2);
  for (std::size_t length = 0; length < whole2.size(); ++length) {
    EXPECT_EQ(code_of(whole2.substr(0, length)), ErrorCode::parse) << length;
  }
  EXPECT_EQ(code_of(std::string("\x93NUMPY\x02\x00", 8) + testing::little_endian(1U << 30U, 4) + good),
            ErrorCode::parse);
}

TEST(Npy, RefusesHostileHeaders) {
  for (const char* header : {
           "",
           "{",
           "}",
           "{'descr': '<f4', 'fortran_order': False}",
           "{'descr': '>f4', 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<c8', 'fortran_order': False, 'shape': (2,)}",
           "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<f4', 'fortran_order': True, 'shape': (2,1)}",
           "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': 2}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (2 3)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1)}",
           "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<f4', 'other': 1, 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x",
           "{'descr': '<f4, 'fortran_order': False, 'shape': (2,)}",
           "{descr: '<f4', 'fortran_order': False, 'shape': (2,)}",
           "{'descr' '<f4', 'fortran_order': False, 'shape': (2,)}",
           "{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}",
       }) {
    EXPECT_EQ(code_of(npy(header, 8)), ErrorCode::parse) << header;
  }
  EXPECT_EQ(code_of(npy("{'descr':'<f4','fortran_order':False,'shape':(4611686018427387904,4,0)}", 0)),
            ErrorCode::overflow);
}

TEST(Npy, WritesWhatItReads) {
  const TemporaryFolder folder;
  for (const DType dtype : {DType::fp64, DType::fp32, DType::fp16, DType::bf16, DType::int8, DType::int32, DType::int64,
                            DType::uint8, DType::uint32, DType::uint64}) {
    for (const std::vector<std::int64_t>& shape :
         std::vector<std::vector<std::int64_t>>{{}, {5}, {2, 3}, {1, 2, 3, 4, 1, 2}, {0, 4}}) {
      const Array array(dtype, shape);
      for (std::size_t at = 0; at < array.size_bytes(); ++at) array.data()[at] = static_cast<std::byte>(at * 7 + 3);
      const std::string path = folder.file("round.npy");
      write_npy(path, array.tensor());
      const Array again = read_npy(path);
      EXPECT_EQ(again.dtype(), dtype);
      EXPECT_EQ(again.shape(), shape);
      EXPECT_EQ(std::memcmp(again.data(), array.data(), array.size_bytes()), 0);
      EXPECT_EQ(parse_npy_header(MappedFile(path).bytes(), path).data_offset % 64, 0U);
    }
  }
  EXPECT_EQ(folder.count(), 1U) << "a temporary file was left behind";
}

TEST(Npy, WritesNothingWhenItCannot) {
  const TemporaryFolder folder;
  float values[6] = {};
  const Tensor transposed = Tensor::strided(values, DType::fp32, {2, 3}, {1, 2});
  EXPECT_THROW(write_npy(folder.file("a.npy"), transposed), Error);
  EXPECT_THROW(write_npy(folder.file("a.npy"), Tensor{}), Error);
  EXPECT_THROW(write_npy(folder.file("a.npy"), Tensor::contiguous(values, DType::e4m3, {4})), Error);
  EXPECT_EQ(folder.count(), 0U);
  const Tensor tensor = Tensor::contiguous(values, DType::fp32, {6});
  try {
    write_npy(folder.file("missing/a.npy"), tensor);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_EQ(error.argument(), folder.file("missing/a.npy"));
  }
}

TEST(Npy, NamesTheFileThatCannotBeOpened) {
  try {
    read_npy("/nonexistent/x.npy");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_EQ(error.argument(), "/nonexistent/x.npy");
  }
  EXPECT_THROW(read_npy("/tmp"), Error);
}

}  // namespace
}  // namespace tessera::files
