// SPDX-License-Identifier: Apache-2.0
// Devices, contexts and device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/driver/driver.h"
#include "tessera/cuda.h"

namespace tessera::cuda {

/// The properties of a device, read once. Throws Error{unsupported} without a driver, Error{invalid_argument} if there
/// is no device of this index.
const Device& device(int index);
/// The device of the calling thread's current context; 0 if there is none.
int current_device();

/// While this object lives, the calling thread's current context belongs to device `index`. If the current context does
/// not, the device's primary context becomes current, which the CUDA runtime, PyTorch and others share.
class CurrentContext {
 public:
  explicit CurrentContext(int index);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

/// Whether a stream of the current context is being captured into a graph. An error of the driver counts as yes: the
/// legacy default stream gives one while a stream that synchronizes with it is captured.
bool is_capturing(void* stream);
/// An id that no other stream of the process ever has. A handle, in contrast, may be reused after its stream is
/// destroyed, and the per-thread default streams of all threads share one handle. nullopt if the driver gives no id.
std::optional<std::uint64_t> stream_id(void* stream);

/// Allocates device memory in a device's context, at least 256-byte aligned. Returns nullptr for 0 bytes. Throws
/// std::bad_alloc if there is not enough memory.
void* allocate(int index, std::size_t bytes);
/// Waits until the device no longer uses the memory. Never throws: at the end of a process the driver may be gone.
void release(int index, void* memory) noexcept;

inline DevicePointer address(const void* memory) noexcept { return reinterpret_cast<DevicePointer>(memory); }

}  // namespace tessera::cuda
