// SPDX-License-Identifier: Apache-2.0
#include "device/green_context.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver/device.h"
#include "cuda/driver/library.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

// Types of the driver's ABI.
constexpr int kMultiprocessorResource = 1;
constexpr unsigned kDefaultStream = 1;
struct alignas(8) Resource {
  int type;
  std::array<std::byte, 92> internal;
  std::uint32_t multiprocessors;
  std::array<std::byte, 156> rest;  // 44 in CUDA 12 and 13; room for versions to come
};
static_assert(offsetof(Resource, multiprocessors) == 96);
using Description = struct CUdevResourceDesc_st*;
using Green = struct CUgreenCtx_st*;

struct Functions {
  cuda::Result (*resource)(cuda::DeviceHandle, Resource*, int type);
  cuda::Result (*split)(Resource* groups, unsigned* count, const Resource* all, Resource* rest, unsigned flags,
                        unsigned least);
  cuda::Result (*describe)(Description*, Resource*, unsigned count);
  cuda::Result (*create)(Green*, Description, cuda::DeviceHandle, unsigned flags);
  cuda::Result (*context)(cuda::ContextHandle*, Green);
};

Functions find_functions() {
  const cuda::Library library = cuda::Library::already_loaded("libcuda.so.1");
  Functions f{};
  if (!library.find("cuDeviceGetDevResource", f.resource) || !library.find("cuDevSmResourceSplitByCount", f.split) ||
      !library.find("cuDevResourceGenerateDesc", f.describe) || !library.find("cuGreenCtxCreate", f.create) ||
      !library.find("cuCtxFromGreenCtx", f.context)) {
    throw Error(ErrorCode::unsupported, "--multiprocessors", "a driver without green contexts", "CUDA 12.4 or newer");
  }
  return f;
}

}  // namespace

GreenContext::GreenContext(int device, int multiprocessors) {
  const int all = cuda::device(device).multiprocessors;
  if (multiprocessors < 1 || multiprocessors > all) {
    throw Error(ErrorCode::invalid_argument, "--multiprocessors", std::to_string(multiprocessors),
                "1 to " + std::to_string(all));
  }
  const cuda::Driver& d = cuda::driver();
  const Functions f = find_functions();
  cuda::DeviceHandle handle = 0;
  cuda::check(d.device(&handle, device), "cuDeviceGet");
  Resource whole{}, part{};
  unsigned groups = 1;
  Description description = nullptr;
  Green green = nullptr;  // lives as long as the process: kernels loaded in it are kept
  cuda::ContextHandle context = nullptr;
  {
    const cuda::CurrentContext primary(device);  // green contexts want it to be there
    cuda::check(f.resource(handle, &whole, kMultiprocessorResource), "cuDeviceGetDevResource");
    cuda::check(f.split(&part, &groups, &whole, nullptr, 0, static_cast<unsigned>(multiprocessors)),
                "cuDevSmResourceSplitByCount");
    cuda::check(f.describe(&description, &part, 1), "cuDevResourceGenerateDesc");
    cuda::check(f.create(&green, description, handle, kDefaultStream), "cuGreenCtxCreate");
    cuda::check(f.context(&context, green), "cuCtxFromGreenCtx");
  }
  cuda::check(d.context_push(context), "cuCtxPushCurrent");
  multiprocessors_ = static_cast<int>(part.multiprocessors);
}

GreenContext::~GreenContext() {
  cuda::ContextHandle context = nullptr;
  cuda::driver().context_pop(&context);
}

}  // namespace tessera::cli
