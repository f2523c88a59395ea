// SPDX-License-Identifier: Apache-2.0
#include "api/device_bytes.h"

#include "cuda/driver/device.h"
#include "cuda/driver/driver.h"

namespace tessera::detail {

DeviceBytes::DeviceBytes(Device device, std::size_t bytes)
    : index_(device.index), data_(static_cast<std::byte*>(cuda::allocate(device.index, bytes))) {}

DeviceBytes::~DeviceBytes() { cuda::release(index_, data_); }

void DeviceBytes::fill(std::byte value, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  const cuda::CurrentContext context(index_);
  cuda::check(cuda::driver().fill_bytes(cuda::address(data_), static_cast<unsigned char>(value), bytes,
                                        static_cast<cuda::StreamHandle>(stream.handle)),
              "cuMemsetD8Async");
}

void DeviceBytes::put(std::size_t at, const void* from, std::size_t bytes) const {
  if (bytes == 0) return;
  const cuda::CurrentContext context(index_);
  cuda::check(cuda::driver().context_synchronize(), "cuCtxSynchronize");
  cuda::check(cuda::driver().copy_to_device(cuda::address(data_ + at), from, bytes), "cuMemcpyHtoD");
}

void DeviceBytes::get(std::size_t at, void* to, std::size_t bytes) const {
  if (bytes == 0) return;
  const cuda::CurrentContext context(index_);
  cuda::check(cuda::driver().context_synchronize(), "cuCtxSynchronize");
  cuda::check(cuda::driver().copy_from_device(to, cuda::address(data_ + at), bytes), "cuMemcpyDtoH");
}

}  // namespace tessera::detail
