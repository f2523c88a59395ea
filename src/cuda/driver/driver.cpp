// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver/driver.h"

#include <utility>

#include "cuda/driver/library.h"
#include "tessera/cuda.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

// The last is that of WSL, which is not in the loader's path.
constexpr const char* kNames[] = {"libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1"};
constexpr int kOldestVersion = 12000;

/// Returns the first entry point that is missing, or "".
std::string bind(const Library& library, Driver& d) {
  std::string missing;
  const auto find = [&](const char* symbol, auto*& function) {
    if (!library.find(symbol, function) && missing.empty()) missing = symbol;
  };
  find("cuInit", d.init);
  find("cuDriverGetVersion", d.driver_version);
  find("cuGetErrorName", d.error_name);
  find("cuGetErrorString", d.error_string);
  find("cuDeviceGetCount", d.device_count);
  find("cuDeviceGet", d.device);
  find("cuDeviceGetName", d.device_name);
  find("cuDeviceTotalMem_v2", d.device_memory);
  find("cuDeviceGetAttribute", d.device_attribute);
  find("cuDevicePrimaryCtxRetain", d.primary_context_retain);
  find("cuCtxGetCurrent", d.context_current);
  find("cuCtxPushCurrent_v2", d.context_push);
  find("cuCtxPopCurrent_v2", d.context_pop);
  find("cuCtxGetDevice", d.context_device);
  find("cuCtxGetId", d.context_id);
  find("cuCtxSynchronize", d.context_synchronize);
  find("cuModuleLoadData", d.module_load);
  find("cuModuleUnload", d.module_unload);
  find("cuModuleGetFunction", d.module_function);
  find("cuFuncGetAttribute", d.function_attribute);
  find("cuFuncSetAttribute", d.set_function_attribute);
  find("cuOccupancyMaxActiveBlocksPerMultiprocessor", d.occupancy);
  find("cuLaunchKernelEx", d.launch);
  find("cuMemAlloc_v2", d.allocate);
  find("cuMemFree_v2", d.free);
  find("cuMemcpyHtoD_v2", d.copy_to_device);
  find("cuMemcpyDtoH_v2", d.copy_from_device);
  find("cuMemsetD8Async", d.fill_bytes);
  find("cuStreamCreate", d.stream_create);
  find("cuStreamDestroy_v2", d.stream_destroy);
  find("cuStreamSynchronize", d.stream_synchronize);
  find("cuStreamIsCapturing", d.stream_capture_status);
  find("cuStreamBeginCapture_v2", d.capture_begin);
  find("cuStreamEndCapture", d.capture_end);
  find("cuGraphInstantiateWithFlags", d.graph_instantiate);
  find("cuGraphLaunch", d.graph_launch);
  find("cuGraphExecDestroy", d.graph_exec_destroy);
  find("cuGraphDestroy", d.graph_destroy);
  find("cuEventCreate", d.event_create);
  find("cuEventDestroy_v2", d.event_destroy);
  find("cuEventRecord", d.event_record);
  find("cuEventSynchronize", d.event_synchronize);
  find("cuEventElapsedTime", d.event_elapsed);
  library.find("cuStreamGetId", d.stream_id);
  library.find("cuTensorMapEncodeTiled", d.tensor_map_encode_tiled);
  return missing;
}

struct Found {
  Driver driver{};
  int version = 0;
  bool usable = false;
  std::string why;
};

Found open_driver() {
  Found found;
  Library library;
  for (const char* name : kNames) {
    library = Library(name);
    if (library) break;
    found.why += (found.why.empty() ? "sought as " : ", ") + std::string(name);
  }
  if (!library) return found;
  if (const std::string missing = bind(library, found.driver); !missing.empty()) {
    found.why = "libcuda lacks " + missing;
    return found;
  }
  const Driver& d = found.driver;
  if (const Result result = d.init(0); result != kSuccess) {
    found.why = "cuInit: " + std::to_string(result);
    const char* text = nullptr;
    if (d.error_name(result, &text) == kSuccess && text != nullptr) found.why = std::string("cuInit: ") + text;
    return found;
  }
  d.driver_version(&found.version);
  found.usable = found.version >= kOldestVersion;
  if (!found.usable) found.why = "the driver is for CUDA " + std::to_string(found.version / 1000);
  return found;
}

const Found& found_driver() {
  static const Found found = open_driver();
  return found;
}

}  // namespace

const Driver* find_driver(std::string* why) {
  const Found& found = found_driver();
  if (why != nullptr) *why = found.why;
  return found.usable ? &found.driver : nullptr;
}

const Driver& driver() {
  const Found& found = found_driver();
  if (found.usable) return found.driver;
  throw Error(ErrorCode::unsupported, "cuda", "no usable driver (" + found.why + ")",
              "an NVIDIA driver for CUDA 12 or newer: libcuda.so.1 and a GPU");
}

int driver_version_or_zero() { return found_driver().usable ? found_driver().version : 0; }

int driver_version() {
  driver();
  return found_driver().version;
}

std::string describe(Result result) {
  const Driver* d = find_driver();
  const char* name = nullptr;
  const char* text = nullptr;
  if (d == nullptr || d->error_name(result, &name) != kSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  if (d->error_string(result, &text) != kSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  throw Error(ErrorCode::internal, what, describe(result), "success");
}

}  // namespace tessera::cuda
