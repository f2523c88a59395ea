// SPDX-License-Identifier: Apache-2.0
#include "jax/call.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tessera/error.h"

namespace tessera::python::xla {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kXlaAlignment = 16;  // XLA refuses to be asked for a larger one

std::optional<DType> dtype_of(ElementType type) noexcept {
  switch (type) {
    case ElementType::s8:
      return DType::int8;
    case ElementType::s32:
      return DType::int32;
    case ElementType::s64:
      return DType::int64;
    case ElementType::u8:
      return DType::uint8;
    case ElementType::u32:
      return DType::uint32;
    case ElementType::u64:
      return DType::uint64;
    case ElementType::f16:
      return DType::fp16;
    case ElementType::f32:
      return DType::fp32;
    case ElementType::f64:
      return DType::fp64;
    case ElementType::bf16:
      return DType::bf16;
    case ElementType::f8e5m2:
      return DType::e5m2;
    case ElementType::f8e4m3fn:
      return DType::e4m3;
  }
  return std::nullopt;
}

Tensor tensor_of(const Items& items, std::int64_t index, Device device, const char* name) {
  if (index < 0 || index >= items.size || items.kinds[index] != kBuffer) {
    throw Error(ErrorCode::internal, name, "no buffer " + std::to_string(index), "one");
  }
  const auto& buffer = *static_cast<const Buffer*>(items.items[index]);
  const std::optional<DType> dtype = dtype_of(buffer.type);
  if (!dtype) {
    const auto number = std::to_string(static_cast<std::int32_t>(buffer.type));
    throw Error(ErrorCode::invalid_argument, name, "XLA's element type " + number, "one that Tessera has");
  }
  return Tensor::contiguous(buffer.data, *dtype, buffer.dims, static_cast<int>(buffer.rank), device);
}

void check(const CallFrame& frame, Failure* failure, const char* what) {
  if (failure == nullptr) return;
  GetMessage told{sizeof(GetMessage), nullptr, failure, nullptr};
  frame.api->get_message(&told);
  const std::string message = told.message == nullptr ? "an error of XLA" : told.message;
  DestroyError arguments{sizeof(DestroyError), nullptr, failure};
  frame.api->destroy_error(&arguments);
  throw Error(ErrorCode::internal, what, message, "no error");
}

}  // namespace

const void* Call::attribute(std::string_view name, std::int32_t kind) const {
  const Attributes& all = frame_.attributes;
  for (std::int64_t i = 0; i < all.size; ++i) {
    const Span& known = *all.names[i];
    if (std::string_view(known.data, known.size) == name && all.kinds[i] == kind) return all.items[i];
  }
  throw Error(ErrorCode::internal, std::string(name), "no attribute", "one, as tessera.jax gives it");
}

std::string_view Call::text(std::string_view attribute) const {
  const auto& span = *static_cast<const Span*>(this->attribute(attribute, kString));
  return {span.data, span.size};
}

std::span<const std::int64_t> Call::numbers(std::string_view attribute) const {
  const auto& array = *static_cast<const Array*>(this->attribute(attribute, kArray));
  if (array.type != ElementType::s64) {
    throw Error(ErrorCode::internal, std::string(attribute), "another type", "64-bit integers");
  }
  return {static_cast<const std::int64_t*>(array.data), array.size};
}

Tensor Call::argument(std::int64_t index, Device device) const {
  return tensor_of(frame_.arguments, index, device, "arguments");
}

Tensor Call::result(std::int64_t index, Device device) const {
  return tensor_of(frame_.results, index, device, "results");
}

int Call::ordinal() const {
  const Api& api = *frame_.api;
  if (api.bytes < sizeof(Api)) {
    throw Error(ErrorCode::unsupported, "jax", "an FFI that does not tell the device", "jax 0.9 or newer on a GPU");
  }
  GetOrdinal arguments{sizeof(GetOrdinal), nullptr, frame_.context, 0};
  check(frame_, api.get_ordinal(&arguments), "XLA_FFI_DeviceOrdinal_Get");
  return arguments.ordinal;
}

void* Call::stream() const {
  GetStream arguments{sizeof(GetStream), nullptr, frame_.context, nullptr};
  check(frame_, frame_.api->get_stream(&arguments), "XLA_FFI_Stream_Get");
  return arguments.stream;
}

Call::Scratch::Scratch(const Call& call, std::size_t bytes)
    : frame_(call.frame_), bytes_(bytes + kAlignment - kXlaAlignment) {
  if (bytes == 0) return;
  Allocate arguments{sizeof(Allocate), nullptr, frame_.context, bytes_, kXlaAlignment, nullptr};
  check(frame_, frame_.api->allocate(&arguments), "XLA_FFI_DeviceMemory_Allocate");
  given_ = arguments.data;
}

void* Call::Scratch::data() const noexcept {
  if (given_ == nullptr) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(given_);
  return static_cast<std::byte*>(given_) + (kAlignment - address % kAlignment) % kAlignment;
}

Call::Scratch::~Scratch() {
  if (given_ == nullptr) return;
  Free arguments{sizeof(Free), nullptr, frame_.context, bytes_, given_};
  Failure* failure = frame_.api->free(&arguments);
  if (failure == nullptr) return;
  DestroyError destroy{sizeof(DestroyError), nullptr, failure};
  frame_.api->destroy_error(&destroy);
}

bool tell_metadata(const CallFrame& frame) noexcept {
  for (Extension* each = frame.extensions; each != nullptr; each = each->next) {
    if (each->kind != kMetadataExtension) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(each)->metadata;
    // The structs here have been the same in every version 0.x; XLA wants its own number to be said.
    metadata.version.major = 0;
    metadata.version.minor = frame.api->version.minor;
    metadata.traits = 0;
    return true;
  }
  return false;
}

Failure* failure_of(const CallFrame& frame, Code code, const char* message) noexcept {
  MakeError arguments{sizeof(MakeError), nullptr, message, code};
  return frame.api->make_error(&arguments);
}

}  // namespace tessera::python::xla
