// SPDX-License-Identifier: Apache-2.0
#include "tessera/tensor.h"

#include <limits>

#include "base/checked.h"
#include "base/dlpack.h"
#include "base/element.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::checked_extent;

enum class Use : std::uint8_t { metadata, operand, operand_and_result };

struct DTypeRow {
  DType dtype;
  std::string_view name;
  std::size_t bytes;
  DLDataType dl;
  Use use = Use::metadata;
};

constexpr DTypeRow kDTypes[] = {
    {DType::fp64, "fp64", 8, {detail::kDlFloat, 64, 1}},
    {DType::fp32, "fp32", 4, {detail::kDlFloat, 32, 1}, Use::operand_and_result},
    {DType::fp16, "fp16", 2, {detail::kDlFloat, 16, 1}, Use::operand_and_result},
    {DType::bf16, "bf16", 2, {detail::kDlBfloat, 16, 1}, Use::operand_and_result},
    {DType::e4m3, "e4m3", 1, {detail::kDlFloat8E4m3fn, 8, 1}, Use::operand},
    {DType::e5m2, "e5m2", 1, {detail::kDlFloat8E5m2, 8, 1}, Use::operand},
    {DType::int8, "int8", 1, {detail::kDlInt, 8, 1}, Use::operand},
    {DType::int32, "int32", 4, {detail::kDlInt, 32, 1}},
    {DType::int64, "int64", 8, {detail::kDlInt, 64, 1}},
    {DType::uint8, "uint8", 1, {detail::kDlUInt, 8, 1}},
    {DType::uint32, "uint32", 4, {detail::kDlUInt, 32, 1}},
    {DType::uint64, "uint64", 8, {detail::kDlUInt, 64, 1}},
};

/// The names of the types with at least this use: "a, b or c".
std::string types_of(Use least) {
  std::string text;
  std::string_view last;
  for (const DTypeRow& row : kDTypes) {
    if (row.use < least) continue;
    if (!last.empty()) text.append(text.empty() ? "" : ", ").append(last);
    last = row.name;
  }
  return text.append(" or ").append(last);
}

const DTypeRow& row_of(DType dtype) noexcept {
  const auto index = static_cast<std::size_t>(dtype);
  return kDTypes[index < std::size(kDTypes) ? index : 0];
}

std::string shape_text(const std::int64_t* shape, int rank) {
  std::string text = "(";
  for (int i = 0; i < rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + ")";
}

/// Checks rank, sizes and byte count of a view; `argument` is its name in errors.
void check_shape(const std::int64_t* shape, int rank, DType dtype, std::string_view argument) {
  if (rank < 0 || rank > Tensor::kMaxRank) {
    throw Error(ErrorCode::invalid_argument, std::string(argument), std::to_string(rank) + " dimensions",
                "0 to " + std::to_string(Tensor::kMaxRank) + " dimensions");
  }
  for (int i = 0; i < rank; ++i) {
    if (shape[i] < 0) {
      throw Error(ErrorCode::invalid_argument, std::string(argument), "shape " + shape_text(shape, rank),
                  "sizes of 0 and more");
    }
  }
  if (!checked_extent(shape, rank, static_cast<std::int64_t>(size_of(dtype)))) {
    throw Error(ErrorCode::overflow, std::string(argument), "shape " + shape_text(shape, rank),
                "a byte count that fits in 64 bits");
  }
}

void set_row_major(Tensor& tensor) noexcept {
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    tensor.strides[at] = stride;
    stride *= tensor.shape[at] > 0 ? tensor.shape[at] : 1;
  }
}

DType dtype_from_dlpack(const DLDataType& type, std::string_view argument) {
  if (type.lanes != 1) {
    throw Error(ErrorCode::invalid_argument, std::string(argument), std::to_string(type.lanes) + " lanes", "1 lane");
  }
  for (const DTypeRow& row : kDTypes) {
    if (row.dl.code == type.code && row.dl.bits == type.bits) return row.dtype;
  }
  throw Error(ErrorCode::invalid_argument, std::string(argument),
              "DLPack type code " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits",
              "a float, bfloat, float8_e4m3fn, float8_e5m2, int or uint type that Tessera has");
}

Device device_from_dlpack(const DLDevice& device, std::string_view argument) {
  switch (device.device_type) {
    case detail::kDlCpu:
    case detail::kDlCudaHost:
      return {DeviceType::cpu, 0};
    case detail::kDlCuda:
      return {DeviceType::cuda, device.device_id};
    default:
      throw Error(ErrorCode::invalid_argument, std::string(argument),
                  "DLPack device type " + std::to_string(device.device_type), "CPU (1), CUDA (2) or CUDA host (3)");
  }
}

}  // namespace

namespace detail {

bool is_operand(DType dtype) noexcept { return row_of(dtype).use >= Use::operand; }
bool is_result(DType dtype) noexcept { return row_of(dtype).use == Use::operand_and_result; }
std::string operand_types() { return types_of(Use::operand); }
std::string result_types() { return types_of(Use::operand_and_result); }

}  // namespace detail

std::size_t size_of(DType dtype) noexcept { return row_of(dtype).bytes; }

std::string_view to_string(DType dtype) noexcept { return row_of(dtype).name; }

DType parse_dtype(std::string_view text, std::string_view argument) {
  std::string want = "one of";
  for (const DTypeRow& row : kDTypes) {
    if (row.name == text) return row.dtype;
    want.append(" ").append(row.name);
  }
  throw Error(ErrorCode::parse, std::string(argument), "\"" + std::string(text) + "\"", want);
}

std::string to_string(Device device) {
  if (device.type == DeviceType::cpu) return "cpu";
  return "cuda:" + std::to_string(device.index);
}

Tensor Tensor::contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  return contiguous(data, dtype, shape.begin(), static_cast<int>(shape.size()), device);
}

Tensor Tensor::contiguous(void* data, DType dtype, const std::int64_t* shape, int rank, Device device) {
  check_shape(shape, rank, dtype, "shape");
  Tensor out;
  out.data = data;
  out.dtype = dtype;
  out.device = device;
  out.rank = rank;
  for (int i = 0; i < rank; ++i) out.shape[static_cast<std::size_t>(i)] = shape[i];
  set_row_major(out);
  return out;
}

Tensor Tensor::strided(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                       std::initializer_list<std::int64_t> strides, Device device) {
  if (shape.size() != strides.size()) {
    throw Error(ErrorCode::invalid_argument, "strides", std::to_string(strides.size()) + " strides",
                std::to_string(shape.size()) + ", one for each dimension");
  }
  Tensor out = contiguous(data, dtype, shape, device);
  for (std::size_t i = 0; i < strides.size(); ++i) out.strides[i] = strides.begin()[i];
  return out;
}

std::int64_t Tensor::numel() const {
  for (int i = 0; i < rank; ++i) {
    if (shape[static_cast<std::size_t>(i)] == 0) return 0;
  }
  const auto count = checked_extent(shape.data(), rank, 1);
  if (!count) {
    throw Error(ErrorCode::overflow, "shape", shape_text(shape.data(), rank), "an element count that fits in 64 bits");
  }
  return rank < 0 ? 0 : *count;
}

bool Tensor::is_contiguous() const noexcept {
  for (int i = 0; i < rank; ++i) {
    if (shape[static_cast<std::size_t>(i)] == 0) return true;
  }
  std::int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (shape[at] != 1 && strides[at] != stride) return false;
    if (__builtin_mul_overflow(stride, shape[at], &stride)) return false;
  }
  return true;
}

std::string Tensor::describe() const {
  if (rank < 0) return "unbound";
  std::string text(to_string(dtype));
  text += " " + shape_text(shape.data(), rank);
  if (!is_contiguous()) text += " strides " + shape_text(strides.data(), rank);
  return text + " on " + to_string(device);
}

Tensor Tensor::from_dlpack(const DLTensor& source, std::string_view argument) {
  Tensor out;
  out.dtype = dtype_from_dlpack(source.dtype, argument);
  out.device = device_from_dlpack(source.device, argument);
  if (source.ndim > 0 && source.shape == nullptr) {
    throw Error(ErrorCode::invalid_argument, std::string(argument), "no shape", "a shape");
  }
  check_shape(source.shape, source.ndim, out.dtype, argument);
  if (source.byte_offset > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    throw Error(ErrorCode::overflow, std::string(argument), "byte offset " + std::to_string(source.byte_offset),
                "one that fits in 63 bits");
  }
  out.data = source.data;
  out.byte_offset = static_cast<std::int64_t>(source.byte_offset);
  out.rank = source.ndim;
  for (int i = 0; i < out.rank; ++i) out.shape[static_cast<std::size_t>(i)] = source.shape[i];
  if (source.strides == nullptr) {
    set_row_major(out);
  } else {
    for (int i = 0; i < out.rank; ++i) out.strides[static_cast<std::size_t>(i)] = source.strides[i];
  }
  return out;
}

void Tensor::to_dlpack(DLTensor& target) const {
  if (rank < 0) throw Error(ErrorCode::invalid_argument, "tensor", "unbound", "a bound tensor");
  target.data = data;
  target.device.device_type = device.type == DeviceType::cpu ? detail::kDlCpu : detail::kDlCuda;
  target.device.device_id = device.index;
  target.ndim = rank;
  target.dtype = row_of(dtype).dl;
  // DLPack has no const; a consumer must not write a shape.
  target.shape = const_cast<std::int64_t*>(shape.data());
  target.strides = const_cast<std::int64_t*>(strides.data());
  target.byte_offset = static_cast<std::uint64_t>(byte_offset);
}

}  // namespace tessera
