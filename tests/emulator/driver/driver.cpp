// SPDX-License-Identifier: Apache-2.0
// The driver's entry points that run kernels, which compiler/compiler.cpp has made shared objects of; the others are
// tests/fakes/cuda.cpp's. TESSERA_EMULATED_GPU says which GPU: sm_80 (without it), sm_89, sm_90 or sm_120.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "driver/fibres.h"
#include "driver/memory.h"
#include "driver/signals.h"
#include "driver/tensor_map.h"
#include "fakes/cuda.h"
#include "fakes/launch_config.h"
#include "fakes/tensor_map.h"
#include "kernel_image.h"

namespace {

constexpr int kInvalidValue = 1;
constexpr int kInvalidImage = 200;
constexpr int kIllegalAddress = 700;
constexpr int kLaunchFailed = 719;

struct Kernel {
  int file = -1;  // open as long as the library: its number is in the name by which dlopen knows it again
  void* library = nullptr;
  emulator::Entry entry = nullptr;
  std::uint32_t most_shared_bytes = 48 * 1024;  // more must be asked for
};

std::string& last_failure() {
  static std::string text = "no error";
  return text;
}

int fail(int result, std::string text) {
  last_failure() = std::move(text);
  return result;
}

int environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

int compute_capability() {
  static const int sm = [] {
    const char* text = std::getenv("TESSERA_EMULATED_GPU");
    if (text == nullptr || *text == '\0') return 80;
    for (const int known : {80, 89, 90, 120}) {
      if (text == "sm_" + std::to_string(known)) return known;
    }
    std::fprintf(stderr, "TESSERA_EMULATED_GPU: got '%s'; want sm_80, sm_89, sm_90 or sm_120\n", text);
    std::exit(2);
  }();
  return sm;
}

int shared_bytes_of_block() {
  const int sm = compute_capability();
  return (sm == 80 ? 163 : sm == 90 || sm / 10 == 10 ? 227 : 99) * 1024;
}

int attribute_of(int which) {
  switch (which) {
    case 16:
      return environment("TESSERA_EMULATED_MULTIPROCESSORS", 3);  // few, so that persistent blocks have several tiles
    case 38:
      return 50 << 20;
    case 75:
      return compute_capability() / 10;
    case 76:
      return compute_capability() % 10;
    case 81:
      return shared_bytes_of_block() + 1024;
    case 97:
      return shared_bytes_of_block();
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

int cuGetErrorName(int result, const char** text) {
  return *text = result == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                 : result == kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED"
                                           : "CUDA_ERROR_OTHER",
         0;
}
int cuGetErrorString(int, const char** text) { return *text = last_failure().c_str(), 0; }
int cuDeviceGetName(char* name, int length, int) {
  return std::strncpy(name, "Emulated GPU", static_cast<std::size_t>(length)), 0;
}
int cuDeviceGetAttribute(int* value, int which, int) { return *value = attribute_of(which), 0; }

int cuModuleLoadData(void** module, const void* image) {
  emulator::KernelImage header;
  std::memcpy(&header, image, sizeof(header));
  if (header.mark != emulator::KernelImage::kMark) return fail(kInvalidImage, "this is no emulated kernel");
  const int file = ::memfd_create("kernel", MFD_CLOEXEC);
  const auto* bytes = static_cast<const char*>(image) + sizeof(header);
  for (std::uint64_t written = 0; written < header.bytes;) {
    const ssize_t got = ::write(file, bytes + written, header.bytes - written);
    if (got <= 0) return fail(kInvalidImage, "no memory for a kernel");
    written += static_cast<std::uint64_t>(got);
  }
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  auto kernel = std::make_unique<Kernel>();
  kernel->file = file;
  kernel->library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (kernel->library == nullptr) return fail(kInvalidImage, ::dlerror());
  kernel->entry = reinterpret_cast<emulator::Entry>(::dlsym(kernel->library, "emulated_entry"));
  if (kernel->entry == nullptr) return fail(kInvalidImage, ::dlerror());
  return *module = kernel.release(), 0;
}
int cuModuleUnload(void* module) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(module));
  ::dlclose(kernel->library);
  return ::close(kernel->file), 0;
}
int cuModuleGetFunction(void** function, void* module, const char*) { return *function = module, 0; }
int cuFuncGetAttribute(int* value, int which, void*) { return *value = which == 4 ? 42 : 0, 0; }
int cuFuncSetAttribute(void* function, int which, int value) {
  if (which != 8) return 0;
  if (value > shared_bytes_of_block()) return fail(kInvalidValue, "more shared memory than a block may have");
  return static_cast<Kernel*>(function)->most_shared_bytes = static_cast<std::uint32_t>(value), 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, std::size_t) { return *blocks = 2, 0; }

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto& kernel = *static_cast<const Kernel*>(function);
  if (config->shared_bytes > kernel.most_shared_bytes) return fail(kInvalidValue, "more shared memory than asked for");
  if (config->block[0] % 32 != 0 || config->block[0] > 1024 || config->block[1] != 1 || config->block[2] != 1) {
    return fail(kInvalidValue, "a block of another form than whole warps in a row");
  }
  static const auto order = static_cast<std::uint64_t>(environment("TESSERA_EMULATED_ORDER", 1));
  emulator::block_size = {config->block[0], 1, 1};
  emulator::grid_size = {config->grid[0], config->grid[1], config->grid[2]};
  const emulator::CaughtSignals signals;
  emulator::begin_shared(config->shared_bytes);
  std::string failure;
  emulator::Index& at = emulator::block_index;
  for (at.z = 0; at.z < config->grid[2] && failure.empty(); ++at.z) {
    for (at.y = 0; at.y < config->grid[1] && failure.empty(); ++at.y) {
      for (at.x = 0; at.x < config->grid[0] && failure.empty(); ++at.x) {
        emulator::poison_shared();
        failure = emulator::run_block(kernel.entry, parameters, static_cast<int>(config->block[0]), order);
        if (failure.empty()) failure = emulator::check_ends();
      }
    }
  }
  emulator::end_shared();
  if (failure.empty()) return 0;
  return fail(failure.find("an access to") != std::string::npos ? kIllegalAddress : kLaunchFailed, failure);
}

int cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                           const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t*, int,
                           int swizzle, int, int) {
  if (const int result = check_tensor_map(map, type, rank, address, sizes, strides, box, swizzle); result != 0)
    return result;
  if (box[0] * bytes_of_map_type(type) != (swizzle == 3 ? 128U : 64U))
    return fail(kInvalidValue, "a box of another width than the swizzle's");
  emulator::TensorMap tensor{.mark = emulator::TensorMap::kMark, .address = static_cast<const char*>(address)};
  tensor.element = static_cast<std::uint8_t>(bytes_of_map_type(type));
  tensor.rank = static_cast<std::uint8_t>(rank);
  std::copy_n(sizes, rank, tensor.sizes);
  std::copy_n(strides, rank - 1, tensor.strides);
  std::copy_n(box, rank, tensor.box);
  std::memset(map, 0, 128);
  std::memcpy(map, &tensor, sizeof(tensor));
  return 0;
}

int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  void* memory = emulator::allocate(bytes);
  return *address = reinterpret_cast<std::uint64_t>(memory), memory != nullptr ? 0 : 2;
}
int cuMemFree_v2(std::uint64_t address) { return emulator::release(reinterpret_cast<void*>(address)), 0; }
}
