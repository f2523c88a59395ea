// SPDX-License-Identifier: Apache-2.0
#include "api/c_values.h"

#include "cuda/driver/driver.h"
#include "tessera/cuda.h"

namespace tessera::c_abi {
namespace {

DeviceType device_type(std::int32_t value, const char* argument) {
  if (value == TESSERA_CPU) return DeviceType::cpu;
  if (value == TESSERA_CUDA) return DeviceType::cuda;
  throw Error(ErrorCode::invalid_argument, argument, "device type " + std::to_string(value), "0 (cpu) or 1 (cuda)");
}

/// A plan can be made for a chip on a machine without a GPU. If there is a GPU, it fills in what `from` leaves open.
Target cuda_target_of(const tessera_target& from) {
  const auto check = [](std::int64_t value, const char* member, std::int64_t least) {
    if (value >= least) return;
    throw Error(ErrorCode::invalid_argument, std::string("target.") + member, std::to_string(value),
                std::to_string(least) + " or more");
  };
  check(from.sm, "sm", 0);
  check(from.multiprocessors, "multiprocessors", 0);
  check(from.shared_memory, "shared_memory", 0);
  check(from.device_index, "device_index", -1);
  const bool has_gpu = cuda::driver_version_or_zero() > 0 && !cuda::devices().empty();
  const auto present = [&from] { return Target::cuda_device(from.device_index); };
  Target target = from.sm == 0 ? present() : Target::cuda(from.sm);
  if (has_gpu) {
    const Target gpu = present();
    target.index = gpu.index;
    if (from.emulated != 0 || target.sm == gpu.sm) target.multiprocessors = gpu.multiprocessors;
    if (target.sm == gpu.sm) target.shared_memory = gpu.shared_memory;
  } else {
    target.index = std::max(from.device_index, 0);
  }
  if (from.shared_memory > 0) target.shared_memory = from.shared_memory;
  if (from.multiprocessors > 0) target.multiprocessors = from.multiprocessors;
  target.emulated = from.emulated != 0;
  return target;
}

}  // namespace

DType dtype_of(int value, const char* argument) {
  if (value < TESSERA_FP64 || value > TESSERA_UINT64) {
    throw Error(ErrorCode::invalid_argument, argument, "dtype " + std::to_string(value), "one of TESSERA_FP64 …");
  }
  return static_cast<DType>(value);
}

Tensor tensor_of(const tessera_tensor* given, const char* argument) {
  const tessera_tensor from = sized(given, argument);
  const Device device{device_type(from.device_type, argument), from.device_index};
  if (from.rank < 0 || from.rank > TESSERA_MAX_RANK) {
    throw Error(ErrorCode::invalid_argument, argument, std::to_string(from.rank) + " dimensions", "0 to 6 dimensions");
  }
  Tensor tensor = Tensor::contiguous(from.data, dtype_of(from.dtype, argument), from.shape, from.rank, device);
  std::copy(from.strides, from.strides + from.rank, tensor.strides.begin());
  tensor.byte_offset = from.byte_offset;
  return tensor;
}

Target target_of(const tessera_target* given) {
  if (given == nullptr) return Target::cpu();
  const tessera_target from = sized(given, "target");
  if (device_type(from.device_type, "target") == DeviceType::cuda) return cuda_target_of(from);
  return Target::cpu(from.threads, from.isa != nullptr ? from.isa : "");
}

Wishes wishes_of(const char* text) { return Wishes::parse(text != nullptr ? text : ""); }

Slot slot_of(const char* name) {
  const auto slot = parse_slot(&required(name, "slot"));
  if (!slot) throw Error(ErrorCode::invalid_argument, "slot", "\"" + std::string(name) + "\"", "a slot's name");
  return *slot;
}

std::vector<ExtraTensor> extras_of(const tessera_extra* given, std::size_t count) {
  if (count > static_cast<std::size_t>(kMaxExtras)) {
    throw Error(ErrorCode::invalid_argument, "extras", std::to_string(count) + " tensors",
                "at most " + std::to_string(kMaxExtras));
  }
  std::vector<ExtraTensor> extras;
  for (std::size_t i = 0; i < count; ++i) {
    const tessera_extra from = sized(&required(given, "extras") + i, "extras");
    extras.push_back({&required(from.name, "extras"), dtype_of(from.dtype, "extras"), from.rank});
  }
  return extras;
}

}  // namespace tessera::c_abi
