// SPDX-License-Identifier: Apache-2.0
#include "cases/device_copy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "cuda/driver/device.h"
#include "cuda/driver/driver.h"

namespace tessera::cases {
namespace {

constexpr std::size_t kPlace = 256;    // every buffer begins at a multiple of this
constexpr std::size_t kRowStart = 16;  // alignment of a tensor's first element
constexpr std::byte kPoison{0xFF};
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

DeviceCopy::DeviceCopy(Inputs& inputs, std::size_t workspace_bytes, int device, Placement placement)
    : placement_(placement), device_(device), bindings_(inputs.bindings()) {
  const cuda::CurrentContext context(device);
  for (const Inputs::BufferView& buffer : inputs.buffers()) {
    const std::size_t start = buffer.begin;
    if (placement == Placement::together) {
      place(buffer.bytes.data(), buffer.bytes.size(), (kRowStart - start % kRowStart) % kRowStart, device);
    } else {
      place(buffer.bytes.data() + start, buffer.bytes.size() - start - buffer.guard, 0, device);
    }
  }
  place(nullptr, workspace_bytes, 0, device);
  if (placement == Placement::together) {
    arena_.assign(round_up(regions_.back().at + regions_.back().bytes, kPlace) + kPlace, kPoison);
    allocations_.push_back(cuda::allocate(device, arena_.size()));
    for (Region& region : regions_) region.device = static_cast<std::byte*>(allocations_.front()) + region.at;
  }
  std::size_t index = 0;
  for (const Inputs::BufferView& buffer : inputs.buffers()) {
    Tensor& tensor = bindings_[buffer.slot];
    tensor.data = regions_[index++].device;
    if (placement == Placement::apart) tensor.byte_offset -= static_cast<std::int64_t>(buffer.begin);
    tensor.device = {DeviceType::cuda, device};
  }
  workspace_ = regions_.back().device;
}

DeviceCopy::~DeviceCopy() {
  for (void* memory : allocations_) cuda::release(device_, memory);
}

void DeviceCopy::place(std::byte* host, std::size_t bytes, std::size_t shift, int device) {
  Region region{host, bytes, 0, nullptr};
  if (placement_ == Placement::together) {
    const std::size_t end = regions_.empty() ? 0 : regions_.back().at + regions_.back().bytes;
    region.at = round_up(end, kPlace) + kPlace + shift;
  } else if (bytes > 0) {
    region.device = cuda::allocate(device, bytes);
    allocations_.push_back(region.device);
  }
  regions_.push_back(region);
}

void DeviceCopy::upload() {
  const cuda::CurrentContext context(device_);
  const cuda::Driver& d = cuda::driver();
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) cuda::check(d.copy_to_device(cuda::address(to), from, bytes), "cuMemcpyHtoD");
  };
  std::fill(arena_.begin(), arena_.end(), kPoison);
  for (const Region& region : regions_) {
    if (placement_ == Placement::apart) {
      const std::vector<std::byte> poison(region.host == nullptr ? region.bytes : 0, kPoison);
      copy(region.device, region.host == nullptr ? poison.data() : region.host, region.bytes);
    } else if (region.host != nullptr) {
      std::memcpy(arena_.data() + region.at, region.host, region.bytes);
    }
  }
  if (placement_ == Placement::together) copy(allocations_.front(), arena_.data(), arena_.size());
  cuda::check(d.context_synchronize(), "cuCtxSynchronize");
}

std::string DeviceCopy::download() {
  const cuda::CurrentContext context(device_);
  const cuda::Driver& d = cuda::driver();
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) cuda::check(d.copy_from_device(to, cuda::address(from), bytes), "cuMemcpyDtoH");
  };
  if (placement_ == Placement::apart) {
    for (const Region& region : regions_) {
      if (region.host != nullptr) copy(region.host, region.device, region.bytes);
    }
    return "";
  }
  copy(arena_.data(), allocations_.front(), arena_.size());
  std::size_t slack = 0;  // begin of what lies between regions
  for (const Region& region : regions_) {
    for (; slack < region.at; ++slack) {
      if (arena_[slack] != kPoison)
        return fmt::format("device memory outside every tensor: byte {} was written", slack);
    }
    if (region.host != nullptr) std::memcpy(region.host, arena_.data() + region.at, region.bytes);
    slack = region.at + region.bytes;
  }
  for (; slack < arena_.size(); ++slack) {
    if (arena_[slack] != kPoison) {
      return fmt::format("workspace: byte {} behind its {} was written",
                         slack - regions_.back().at - regions_.back().bytes, regions_.back().bytes);
    }
  }
  return "";
}

Stream device_stream(int device) {
  thread_local std::map<int, cuda::StreamHandle> streams;
  cuda::StreamHandle& stream = streams[device];
  if (stream == nullptr) {
    const cuda::CurrentContext context(device);
    cuda::check(cuda::driver().stream_create(&stream, kNonBlocking), "cuStreamCreate");
  }
  return {stream};
}

void wait_for(Stream stream) {
  cuda::check(cuda::driver().stream_synchronize(static_cast<cuda::StreamHandle>(stream.handle)), "cuStreamSynchronize");
}

bool device_works(int device) noexcept {
  try {
    const cuda::CurrentContext context(device);
    return cuda::driver().context_synchronize() == cuda::kSuccess;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace tessera::cases
