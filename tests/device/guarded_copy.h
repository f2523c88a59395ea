// SPDX-License-Identifier: Apache-2.0
// A case's tensors in device memory of their own, each up against addresses that nothing is mapped to: a kernel that
// reads or writes past one faults.
#pragma once

#include <dlfcn.h>

#include <list>
#include <stdexcept>
#include <string>
#include <vector>

#include "cases/inputs/inputs.h"
#include "cuda/driver/device.h"
#include "cuda/driver/driver.h"

namespace tessera::test {

/// The driver's entry points for address ranges and what is mapped to them, which the library has no use for.
struct VirtualMemory {
  // Their ABI: CUmemAllocationProp and CUmemAccessDesc.
  struct Location {
    int type = 1;  // a device
    int id = 0;
  };
  struct Property {
    int type = 1;  // pinned to its device
    int handle_types = 0;
    Location location;
    void* windows = nullptr;
    std::uint64_t flags = 0;
  };
  struct Access {
    Location location;
    int flags = 3;  // read and write
  };
  static_assert(sizeof(Property) == 32 && sizeof(Access) == 12);
  using Handle = unsigned long long;

  cuda::Result (*granularity)(std::size_t*, const Property*, int option);
  cuda::Result (*reserve)(cuda::DevicePointer*, std::size_t bytes, std::size_t alignment, cuda::DevicePointer wish,
                          unsigned long long flags);
  cuda::Result (*address_free)(cuda::DevicePointer, std::size_t bytes);
  cuda::Result (*create)(Handle*, std::size_t bytes, const Property*, unsigned long long flags);
  cuda::Result (*release)(Handle);
  cuda::Result (*map)(cuda::DevicePointer, std::size_t bytes, std::size_t offset, Handle, unsigned long long flags);
  cuda::Result (*unmap)(cuda::DevicePointer, std::size_t bytes);
  cuda::Result (*set_access)(cuda::DevicePointer, std::size_t bytes, const Access*, std::size_t count);

  /// nullptr where the driver or the device has none of it.
  static const VirtualMemory* find(int device) {
    constexpr auto kSupported = static_cast<cuda::DeviceAttribute>(102);
    static const VirtualMemory found;
    cuda::DeviceHandle handle = 0;
    int supported = 0;
    const bool asked = cuda::driver().device(&handle, device) == cuda::kSuccess &&
                       cuda::driver().device_attribute(&supported, kSupported, handle) == cuda::kSuccess;
    return asked && supported != 0 && found.is_complete_ ? &found : nullptr;
  }

 private:
  VirtualMemory() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto bind = [&](const char* name, auto& function) {
      function =
          library != nullptr ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)) : nullptr;
      is_complete_ &= function != nullptr;
    };
    bind("cuMemGetAllocationGranularity", granularity);
    bind("cuMemAddressReserve", reserve);
    bind("cuMemAddressFree", address_free);
    bind("cuMemCreate", create);
    bind("cuMemRelease", release);
    bind("cuMemMap", map);
    bind("cuMemUnmap", unmap);
    bind("cuMemSetAccess", set_access);
  }
  bool is_complete_ = true;
};

/// Which side of a tensor touches the addresses that are not there.
enum class GuardedSide { begin, end };

class GuardedAllocation {
 public:
  GuardedAllocation(const VirtualMemory& memory, int device, std::size_t bytes, GuardedSide side) : memory_(memory) {
    VirtualMemory::Property property;
    property.location.id = device;
    VirtualMemory::Access access;
    access.location.id = device;
    cuda::check(memory.granularity(&page_, &property, 0), "cuMemGetAllocationGranularity");
    mapped_ = (std::max<std::size_t>(bytes, 1) + page_ - 1) / page_ * page_;
    cuda::check(memory.reserve(&range_, mapped_ + 2 * page_, 0, 0, 0), "cuMemAddressReserve");
    VirtualMemory::Handle handle = 0;
    cuda::check(memory.create(&handle, mapped_, &property, 0), "cuMemCreate");
    const cuda::Result result = memory.map(range_ + page_, mapped_, 0, handle, 0);
    memory.release(handle);  // the mapping keeps it
    cuda::check(result, "cuMemMap");
    cuda::check(memory.set_access(range_ + page_, mapped_, &access, 1), "cuMemSetAccess");
    // A tensor's first element keeps its 16-byte alignment, so up to 15 bytes of slack remain at the end.
    const std::size_t shift = side == GuardedSide::begin ? 0 : (mapped_ - bytes) / 16 * 16;
    data_ = reinterpret_cast<void*>(range_ + page_ + shift);
  }
  ~GuardedAllocation() {
    memory_.unmap(range_ + page_, mapped_);
    memory_.address_free(range_, mapped_ + 2 * page_);
  }
  GuardedAllocation(const GuardedAllocation&) = delete;
  GuardedAllocation& operator=(const GuardedAllocation&) = delete;
  [[nodiscard]] void* data() const { return data_; }

 private:
  const VirtualMemory& memory_;
  std::size_t page_ = 0;
  std::size_t mapped_ = 0;
  cuda::DevicePointer range_ = 0;
  void* data_ = nullptr;
};

/// The tensors of `inputs`; they keep their strides.
class GuardedCopy {
 public:
  GuardedCopy(const VirtualMemory& memory, cases::Inputs& inputs, std::size_t workspace_bytes, int device,
              GuardedSide side)
      : context_(device), bindings_(inputs.bindings()) {
    for (const auto& buffer : inputs.buffers()) {
      Tensor& tensor = bindings_[buffer.slot];
      const auto start = static_cast<std::size_t>(tensor.byte_offset);
      const std::size_t bytes = buffer.bytes.size() - start - buffer.guard;
      const GuardedAllocation& place = places_.emplace_back(memory, device, bytes, side);
      regions_.push_back({buffer.bytes.data() + start, bytes, place.data()});
      tensor.data = place.data();
      tensor.byte_offset = 0;
      tensor.device = {DeviceType::cuda, device};
    }
    workspace_ = places_.emplace_back(memory, device, workspace_bytes, GuardedSide::begin).data();
  }

  [[nodiscard]] const Bindings& bindings() const { return bindings_; }
  [[nodiscard]] void* workspace() const { return workspace_; }
  void upload() {
    for (const Region& region : regions_) {
      if (region.bytes == 0) continue;
      cuda::check(cuda::driver().copy_to_device(cuda::address(region.device), region.host, region.bytes),
                  "cuMemcpyHtoD");
    }
    cuda::check(cuda::driver().context_synchronize(), "cuCtxSynchronize");
  }
  void download() {
    for (const Region& region : regions_) {
      if (region.bytes == 0) continue;
      cuda::check(cuda::driver().copy_from_device(region.host, cuda::address(region.device), region.bytes),
                  "cuMemcpyDtoH");
    }
  }

 private:
  struct Region {
    std::byte* host;
    std::size_t bytes;
    void* device;
  };
  cuda::CurrentContext context_;
  Bindings bindings_;
  std::list<GuardedAllocation> places_;
  std::vector<Region> regions_;
  void* workspace_ = nullptr;
};

}  // namespace tessera::test
