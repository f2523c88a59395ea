// SPDX-License-Identifier: Apache-2.0
// Bytes on a GPU that outlive a call.
#pragma once

#include <cstddef>

#include "tessera/executor.h"
#include "tessera/tensor.h"

namespace tessera::detail {

/// Throws Error for a device that is not there or whose driver reports an error, std::bad_alloc without room.
class DeviceBytes {
 public:
  DeviceBytes(Device device, std::size_t bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// Sets the first `bytes` to `value`, in the order of the stream.
  void fill(std::byte value, std::size_t bytes, Stream stream) const;
  /// Both wait for everything that was queued on the device.
  void put(std::size_t at, const void* from, std::size_t bytes) const;
  void get(std::size_t at, void* to, std::size_t bytes) const;

 private:
  int index_;
  std::byte* data_;
};

}  // namespace tessera::detail
