// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's entry points, found in libcuda at run time. Types follow its stable ABI (CUDA 12 and 13), so that
// cuda.h is not needed to build.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shared/types.h"

namespace tessera::cuda {

// Handles and enumerations of the driver's ABI.
using Result = int;
using DeviceHandle = int;
using DevicePointer = std::uint64_t;
using ContextHandle = struct CUctx_st*;
using ModuleHandle = struct CUmod_st*;
using FunctionHandle = struct CUfunc_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using GraphHandle = struct CUgraph_st*;
using GraphExecHandle = struct CUgraphExec_st*;

inline constexpr Result kSuccess = 0;

enum class DeviceAttribute : int {
  multiprocessors = 16,
  l2_bytes = 38,
  major = 75,
  minor = 76,
  shared_memory_multiprocessor = 81,
  shared_memory_opt_in = 97,
};
enum class FunctionAttribute : int { shared_bytes = 1, local_bytes = 3, registers = 4, dynamic_shared_bytes = 8 };
enum class LaunchAttributeId : std::uint32_t { programmatic_serialization = 6 };
enum class CaptureStatus : int { none = 0, active = 1, invalidated = 2 };

struct LaunchAttribute {
  LaunchAttributeId id;
  std::uint32_t padding = 0;
  union Value {
    std::array<char, 64> bytes{};
    int programmatic_serialization;
  } value{};
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  std::array<std::uint32_t, 3> grid{};
  std::array<std::uint32_t, 3> block{};
  std::uint32_t shared_bytes = 0;
  StreamHandle stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  std::uint32_t attribute_count = 0;
};
static_assert(sizeof(LaunchConfig) == 56);

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_version)(int*);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);

  Result (*device_count)(int*);
  Result (*device)(DeviceHandle*, int ordinal);
  Result (*device_name)(char*, int length, DeviceHandle);
  Result (*device_memory)(std::size_t*, DeviceHandle);
  Result (*device_attribute)(int*, DeviceAttribute, DeviceHandle);
  Result (*primary_context_retain)(ContextHandle*, DeviceHandle);
  Result (*context_current)(ContextHandle*);
  Result (*context_push)(ContextHandle);
  Result (*context_pop)(ContextHandle*);
  Result (*context_device)(DeviceHandle*);
  Result (*context_id)(ContextHandle, unsigned long long*);
  Result (*context_synchronize)();

  Result (*module_load)(ModuleHandle*, const void* image);
  Result (*module_unload)(ModuleHandle);
  Result (*module_function)(FunctionHandle*, ModuleHandle, const char* name);
  Result (*function_attribute)(int*, FunctionAttribute, FunctionHandle);
  Result (*set_function_attribute)(FunctionHandle, FunctionAttribute, int);
  Result (*occupancy)(int* blocks, FunctionHandle, int block_size, std::size_t dynamic_shared_bytes);
  Result (*launch)(const LaunchConfig*, FunctionHandle, void** parameters, void** extra);

  Result (*allocate)(DevicePointer*, std::size_t bytes);
  Result (*free)(DevicePointer);
  Result (*copy_to_device)(DevicePointer, const void*, std::size_t bytes);
  Result (*copy_from_device)(void*, DevicePointer, std::size_t bytes);
  Result (*fill_bytes)(DevicePointer, unsigned char value, std::size_t bytes, StreamHandle);

  Result (*stream_create)(StreamHandle*, unsigned flags);
  Result (*stream_destroy)(StreamHandle);
  Result (*stream_synchronize)(StreamHandle);
  Result (*stream_capture_status)(StreamHandle, CaptureStatus*);
  Result (*stream_id)(StreamHandle, unsigned long long*);  // nullptr if the driver lacks it
  Result (*capture_begin)(StreamHandle, int mode);
  Result (*capture_end)(StreamHandle, GraphHandle*);
  Result (*graph_instantiate)(GraphExecHandle*, GraphHandle, unsigned long long flags);
  Result (*graph_launch)(GraphExecHandle, StreamHandle);
  Result (*graph_exec_destroy)(GraphExecHandle);
  Result (*graph_destroy)(GraphHandle);
  Result (*event_create)(EventHandle*, unsigned flags);
  Result (*event_destroy)(EventHandle);
  Result (*event_record)(EventHandle, StreamHandle);
  Result (*event_synchronize)(EventHandle);
  Result (*event_elapsed)(float* milliseconds, EventHandle begin, EventHandle end);

  /// nullptr if the driver lacks it. It is there also with devices that have no tensor memory accelerator.
  Result (*tensor_map_encode_tiled)(TensorMap*, int data_type, std::uint32_t rank, void* address,
                                    const std::uint64_t* dims, const std::uint64_t* strides_bytes,
                                    const std::uint32_t* box, const std::uint32_t* element_strides, int interleave,
                                    int swizzle, int l2_promotion, int out_of_bounds_fill);
};

/// The driver, opened and initialised on the first call. Throws Error{unsupported} with the reason if there is none, it
/// lacks an entry point, it is too old, or cuInit fails.
const Driver& driver();
/// Whether driver() would succeed, and if not, why.
const Driver* find_driver(std::string* why = nullptr);
/// The driver's version, 0 without a driver.
int driver_version_or_zero();

/// Throws Error{internal} with the driver's message if `result` is not success. `what` names the entry point.
void check(Result result, const char* what);
/// "CUDA_ERROR_INVALID_VALUE (invalid argument)"
std::string describe(Result result);

}  // namespace tessera::cuda
