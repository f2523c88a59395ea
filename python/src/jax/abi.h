// SPDX-License-Identifier: Apache-2.0
// The structs by which XLA calls functions of others (XLA FFI, version 0.x of its C ABI), as far as they are used here.
// They are declared here so that a build needs no jax; tests/python/xla_ffi_layout.cpp holds them against jax's header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::python::xla {

// Each struct begins with its size in bytes, as the side that made it knows it.

struct Extension {
  std::size_t bytes;
  std::int32_t kind;
  Extension* next;
};
constexpr std::int32_t kMetadataExtension = 1;

struct Version {
  std::size_t bytes;
  Extension* extensions;
  int major;
  int minor;
};

struct TypeId {
  std::int64_t value;
};

/// What a function says of itself when it is registered.
struct Metadata {
  std::size_t bytes;
  Version version;
  std::uint32_t traits;  // bit 0: calls may be captured into a command buffer
  TypeId state;          // 0: none
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

/// XLA's element types that a Tensor has too.
enum class ElementType : std::int32_t {
  s8 = 2,
  s32 = 4,
  s64 = 5,
  u8 = 6,
  u32 = 8,
  u64 = 9,
  f16 = 10,
  f32 = 11,
  f64 = 12,
  bf16 = 16,
  f8e5m2 = 19,
  f8e4m3fn = 20,
};

struct Buffer {
  std::size_t bytes;
  Extension* extensions;
  ElementType type;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};
constexpr std::int32_t kBuffer = 1;  // the kind of an argument or result

/// Arguments or results.
struct Items {
  std::size_t bytes;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* kinds;
  void** items;
};

struct Span {
  const char* data;
  std::size_t size;
};

struct Array {
  ElementType type;
  std::size_t size;
  void* data;
};

struct Attributes {
  std::size_t bytes;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* kinds;
  Span** names;
  void** items;
};
constexpr std::int32_t kArray = 1, kString = 4;  // kinds of attributes: Array, Span

struct Api;
struct Context;
struct Failure;  // made by Api::make_error; owned by XLA

enum class Stage : std::int32_t { instantiate, prepare, initialize, execute };

struct CallFrame {
  std::size_t bytes;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Items arguments;
  Items results;
  Attributes attributes;
};

enum class Code : std::int32_t {
  invalid_argument = 3,
  resource_exhausted = 8,
  unimplemented = 12,
  internal = 13,
};

struct MakeError {
  std::size_t bytes;
  Extension* extensions;
  const char* message;
  Code code;
};

struct GetStream {
  std::size_t bytes;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};

struct Allocate {
  std::size_t bytes;
  Extension* extensions;
  Context* context;
  std::size_t size;
  std::size_t alignment;
  void* data;  // out
};

struct Free {
  std::size_t bytes;
  Extension* extensions;
  Context* context;
  std::size_t size;
  void* data;
};

struct GetOrdinal {
  std::size_t bytes;
  Extension* extensions;
  Context* context;
  std::int32_t ordinal;  // out
};

struct GetMessage {
  std::size_t bytes;
  Extension* extensions;
  Failure* failure;
  const char* message;  // out
};

struct DestroyError {
  std::size_t bytes;
  Extension* extensions;
  Failure* failure;
};

struct Api {
  std::size_t bytes;
  Extension* extensions;
  Version version;
  const void* internal;
  Failure* (*make_error)(MakeError*);
  void (*get_message)(GetMessage*);
  void (*destroy_error)(DestroyError*);
  void* register_handler;
  Failure* (*get_stream)(GetStream*);
  void* register_type;
  void* get_context;
  void* set_state;
  void* get_state;
  Failure* (*allocate)(Allocate*);
  Failure* (*free)(Free*);
  void* schedule;
  void* thread_count;
  void* make_future;
  void* set_available;
  void* set_failed;
  void* get_run_id;
  Failure* (*get_ordinal)(GetOrdinal*);  // may be missing: see bytes
};

}  // namespace tessera::python::xla
