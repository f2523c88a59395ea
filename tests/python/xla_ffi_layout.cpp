// SPDX-License-Identifier: Apache-2.0
// Compiles if the structs of python/src/jax/abi.h have the layout of those of jax's header.
#include <cstddef>

#include "jax/abi.h"
#include "xla/ffi/api/c_api.h"

namespace xla = tessera::python::xla;

#define SAME(ours, our_member, its, its_member)                           \
  static_assert(offsetof(ours, our_member) == offsetof(its, its_member)); \
  static_assert(sizeof(ours::our_member) == sizeof(its::its_member))
#define SAME_SIZE(ours, its) static_assert(sizeof(ours) == sizeof(its) && alignof(ours) == alignof(its))

static_assert(XLA_FFI_API_MAJOR == 0);

SAME_SIZE(xla::Extension, XLA_FFI_Extension_Base);
SAME(xla::Extension, kind, XLA_FFI_Extension_Base, type);
SAME(xla::Extension, next, XLA_FFI_Extension_Base, next);
static_assert(static_cast<int>(xla::kMetadataExtension) == static_cast<int>(XLA_FFI_Extension_Metadata));

SAME_SIZE(xla::Version, XLA_FFI_Api_Version);
SAME(xla::Version, major, XLA_FFI_Api_Version, major_version);
SAME(xla::Version, minor, XLA_FFI_Api_Version, minor_version);

SAME_SIZE(xla::Metadata, XLA_FFI_Metadata);
SAME(xla::Metadata, version, XLA_FFI_Metadata, api_version);
SAME(xla::Metadata, traits, XLA_FFI_Metadata, traits);
SAME(xla::Metadata, state, XLA_FFI_Metadata, state_type_id);
SAME_SIZE(xla::MetadataExtension, XLA_FFI_Metadata_Extension);
SAME(xla::MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);

SAME_SIZE(xla::Buffer, XLA_FFI_Buffer);
SAME(xla::Buffer, type, XLA_FFI_Buffer, dtype);
SAME(xla::Buffer, data, XLA_FFI_Buffer, data);
SAME(xla::Buffer, rank, XLA_FFI_Buffer, rank);
SAME(xla::Buffer, dims, XLA_FFI_Buffer, dims);
static_assert(static_cast<int>(xla::kBuffer) == static_cast<int>(XLA_FFI_ArgType_BUFFER));
static_assert(static_cast<int>(xla::kBuffer) == static_cast<int>(XLA_FFI_RetType_BUFFER));

#define SAME_TYPE(ours, its) static_assert(static_cast<int>(xla::ElementType::ours) == static_cast<int>(its))
SAME_TYPE(s8, XLA_FFI_DataType_S8);
SAME_TYPE(s32, XLA_FFI_DataType_S32);
SAME_TYPE(s64, XLA_FFI_DataType_S64);
SAME_TYPE(u8, XLA_FFI_DataType_U8);
SAME_TYPE(u32, XLA_FFI_DataType_U32);
SAME_TYPE(u64, XLA_FFI_DataType_U64);
SAME_TYPE(f16, XLA_FFI_DataType_F16);
SAME_TYPE(f32, XLA_FFI_DataType_F32);
SAME_TYPE(f64, XLA_FFI_DataType_F64);
SAME_TYPE(bf16, XLA_FFI_DataType_BF16);
SAME_TYPE(f8e5m2, XLA_FFI_DataType_F8E5M2);
SAME_TYPE(f8e4m3fn, XLA_FFI_DataType_F8E4M3FN);

SAME_SIZE(xla::Items, XLA_FFI_Args);
SAME(xla::Items, size, XLA_FFI_Args, size);
SAME(xla::Items, kinds, XLA_FFI_Args, types);
SAME(xla::Items, items, XLA_FFI_Args, args);
SAME_SIZE(xla::Items, XLA_FFI_Rets);
SAME(xla::Items, size, XLA_FFI_Rets, size);
SAME(xla::Items, kinds, XLA_FFI_Rets, types);
SAME(xla::Items, items, XLA_FFI_Rets, rets);

SAME_SIZE(xla::Span, XLA_FFI_ByteSpan);
SAME(xla::Span, data, XLA_FFI_ByteSpan, ptr);
SAME(xla::Span, size, XLA_FFI_ByteSpan, len);
SAME_SIZE(xla::Array, XLA_FFI_Array);
SAME(xla::Array, type, XLA_FFI_Array, dtype);
SAME(xla::Array, size, XLA_FFI_Array, size);
SAME(xla::Array, data, XLA_FFI_Array, data);
SAME_SIZE(xla::Attributes, XLA_FFI_Attrs);
SAME(xla::Attributes, size, XLA_FFI_Attrs, size);
SAME(xla::Attributes, kinds, XLA_FFI_Attrs, types);
SAME(xla::Attributes, names, XLA_FFI_Attrs, names);
SAME(xla::Attributes, items, XLA_FFI_Attrs, attrs);
static_assert(static_cast<int>(xla::kArray) == static_cast<int>(XLA_FFI_AttrType_ARRAY));
static_assert(static_cast<int>(xla::kString) == static_cast<int>(XLA_FFI_AttrType_STRING));

// Newer frames have more behind what is read here.
static_assert(sizeof(xla::CallFrame) <= sizeof(XLA_FFI_CallFrame));
SAME(xla::CallFrame, extensions, XLA_FFI_CallFrame, extension_start);
SAME(xla::CallFrame, api, XLA_FFI_CallFrame, api);
SAME(xla::CallFrame, context, XLA_FFI_CallFrame, ctx);
SAME(xla::CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME(xla::CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME(xla::CallFrame, results, XLA_FFI_CallFrame, rets);
SAME(xla::CallFrame, attributes, XLA_FFI_CallFrame, attrs);
static_assert(static_cast<int>(xla::Stage::execute) == static_cast<int>(XLA_FFI_ExecutionStage_EXECUTE));

static_assert(static_cast<int>(xla::Code::invalid_argument) == static_cast<int>(XLA_FFI_Error_Code_INVALID_ARGUMENT));
static_assert(static_cast<int>(xla::Code::resource_exhausted) ==
              static_cast<int>(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED));
static_assert(static_cast<int>(xla::Code::unimplemented) == static_cast<int>(XLA_FFI_Error_Code_UNIMPLEMENTED));
static_assert(static_cast<int>(xla::Code::internal) == static_cast<int>(XLA_FFI_Error_Code_INTERNAL));

SAME_SIZE(xla::MakeError, XLA_FFI_Error_Create_Args);
SAME(xla::MakeError, message, XLA_FFI_Error_Create_Args, message);
SAME(xla::MakeError, code, XLA_FFI_Error_Create_Args, errc);
SAME_SIZE(xla::GetMessage, XLA_FFI_Error_GetMessage_Args);
SAME(xla::GetMessage, failure, XLA_FFI_Error_GetMessage_Args, error);
SAME(xla::GetMessage, message, XLA_FFI_Error_GetMessage_Args, message);
SAME_SIZE(xla::DestroyError, XLA_FFI_Error_Destroy_Args);
SAME(xla::DestroyError, failure, XLA_FFI_Error_Destroy_Args, error);
SAME_SIZE(xla::GetStream, XLA_FFI_Stream_Get_Args);
SAME(xla::GetStream, context, XLA_FFI_Stream_Get_Args, ctx);
SAME(xla::GetStream, stream, XLA_FFI_Stream_Get_Args, stream);
SAME_SIZE(xla::Allocate, XLA_FFI_DeviceMemory_Allocate_Args);
SAME(xla::Allocate, context, XLA_FFI_DeviceMemory_Allocate_Args, ctx);
SAME(xla::Allocate, size, XLA_FFI_DeviceMemory_Allocate_Args, size);
SAME(xla::Allocate, alignment, XLA_FFI_DeviceMemory_Allocate_Args, alignment);
SAME(xla::Allocate, data, XLA_FFI_DeviceMemory_Allocate_Args, data);
SAME_SIZE(xla::Free, XLA_FFI_DeviceMemory_Free_Args);
SAME(xla::Free, context, XLA_FFI_DeviceMemory_Free_Args, ctx);
SAME(xla::Free, size, XLA_FFI_DeviceMemory_Free_Args, size);
SAME(xla::Free, data, XLA_FFI_DeviceMemory_Free_Args, data);
SAME_SIZE(xla::GetOrdinal, XLA_FFI_DeviceOrdinal_Get_Args);
SAME(xla::GetOrdinal, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(xla::GetOrdinal, ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);

SAME(xla::Api, version, XLA_FFI_Api, api_version);
SAME(xla::Api, internal, XLA_FFI_Api, internal_api);
SAME(xla::Api, make_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(xla::Api, get_message, XLA_FFI_Api, XLA_FFI_Error_GetMessage);
SAME(xla::Api, destroy_error, XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME(xla::Api, get_stream, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(xla::Api, allocate, XLA_FFI_Api, XLA_FFI_DeviceMemory_Allocate);
SAME(xla::Api, free, XLA_FFI_Api, XLA_FFI_DeviceMemory_Free);
SAME(xla::Api, get_ordinal, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
