// SPDX-License-Identifier: Apache-2.0
// GPU memory that lives across calls.
#pragma once

#include <cstddef>

#include "tessera/executor.h"
#include "tessera/tensor.h"

namespace tessera::detail {

/// Members throw Error for a device that is not there and for errors of its driver; the constructor throws
/// std::bad_alloc if there is no room.
class DeviceBytes {
 public:
  DeviceBytes(Device device, std::size_t bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// Sets the first `bytes` to `value`, in the order of the stream.
  void fill(std::byte value, std::size_t bytes, Stream stream) const;
  /// put() and get() wait for all work that was queued on the device.
  void put(std::size_t at, const void* from, std::size_t bytes) const;
  void get(std::size_t at, void* to, std::size_t bytes) const;

 private:
  int index_;
  std::byte* data_;
};

}  // namespace tessera::detail
