// SPDX-License-Identifier: Apache-2.0
// Devices, contexts and device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/driver/driver.h"
#include "tessera/cuda.h"

namespace tessera::cuda {

/// Facts of one device, read once. Throws Error{unsupported} without a driver, Error{invalid_argument} for an index
/// that there is not.
const Device& device(int index);
/// Device of the calling thread's current context; 0 when it has none.
int current_device();

/// While it lives, the calling thread's current context is one of device `index`: the one that is current already if
/// it is, else the device's primary context, which the CUDA runtime, PyTorch and others share.
class CurrentContext {
 public:
  explicit CurrentContext(int index);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

/// Whether a stream of the current context is being captured into a graph. Also if the driver does not tell: the legacy
/// default stream answers with an error while a stream that waits for it is captured.
bool is_capturing(void* stream);
/// What no other stream of the process ever has. A handle may come back with another stream once it is destroyed, and
/// the default streams of all threads share one. nullopt where the driver does not tell.
std::optional<std::uint64_t> stream_id(void* stream);

/// Device memory of a device's context, at least 256-byte aligned. nullptr for 0 bytes. Throws std::bad_alloc when
/// there is no more.
void* allocate(int index, std::size_t bytes);
/// Waits for what uses it. Never throws: at the end of a process the driver may be gone.
void release(int index, void* memory) noexcept;

inline DevicePointer address(const void* memory) noexcept { return reinterpret_cast<DevicePointer>(memory); }

}  // namespace tessera::cuda
