// SPDX-License-Identifier: Apache-2.0
// Values of the C ABI as the library's own: sized structs, tensors, targets, names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "tessera/callable.h"
#include "tessera/error.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tessera/tessera.h"
#include "tessera/version.h"

namespace tessera::c_abi {

template <class T>
T& required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw Error(ErrorCode::invalid_argument, argument, "NULL", "a pointer");
  return *pointer;
}

/// A copy of a sized struct, members that the caller does not know zero. Members that this library does not know must
/// be zero.
template <class T>
T sized(const T* given, const char* argument) {
  const std::size_t size = required(given, argument).struct_size;
  constexpr std::size_t kFirstVersion = sizeof(T);
  if (size < kFirstVersion || size > 4096) {
    throw Error(ErrorCode::invalid_argument, std::string(argument) + ".struct_size", std::to_string(size),
                std::to_string(sizeof(T)));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    throw Error(ErrorCode::unsupported, argument, "members of a newer version",
                "those of version " + std::string(version()));
  }
  return *given;
}

DType dtype_of(int value, const char* argument);
Tensor tensor_of(const tessera_tensor* given, const char* argument);
/// nullptr: this machine's CPU.
Target target_of(const tessera_target* given);
Wishes wishes_of(const char* text);
Slot slot_of(const char* name);
std::vector<ExtraTensor> extras_of(const tessera_extra* given, std::size_t count);

}  // namespace tessera::c_abi
