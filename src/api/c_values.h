// SPDX-License-Identifier: Apache-2.0
// Shared by the files of the C ABI: handles, errors as codes, and the conversion of C values to the library's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "tessera/callable.h"
#include "tessera/error.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tessera/tessera.h"
#include "tessera/version.h"

struct tessera_problem {
  tessera::Problem problem;
};

struct tessera_bindings {
  tessera::Bindings bindings;
  // The caller's functions. Trampolines get a pointer to them as user data, and call them.
  tessera_score_function score{};
  tessera_mask_function mask{};
  int (*interrupted)(void* user) = nullptr;
  void* interrupt_user = nullptr;
};

namespace tessera::c_abi {

/// Stores the thread's last error; returns `code`.
int fail(int code, const char* text, const std::string& argument) noexcept;

/// Runs `call`; an exception becomes a code and the thread's last error.
template <class Call>
int guarded(Call&& call) noexcept {
  try {
    call();
    return TESSERA_OK;
  } catch (const Error& error) {
    return fail(static_cast<int>(error.code()), error.what(), error.argument());
  } catch (const std::bad_alloc&) {
    return fail(TESSERA_OUT_OF_MEMORY, "memory: got none; want the allocation to succeed", "memory");
  } catch (const std::exception& error) {
    return fail(TESSERA_INTERNAL, error.what(), "internal");
  } catch (...) {
    return fail(TESSERA_INTERNAL, "internal: got an unknown exception; want none", "internal");
  }
}

void write_text(const std::string& text, char* buffer, std::size_t size, std::size_t* needed) noexcept;

template <class T>
T& required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw Error(ErrorCode::invalid_argument, argument, "NULL", "a pointer");
  return *pointer;
}

/// A copy of a struct with struct_size. A larger struct, of a newer version, is accepted if the members that this
/// library does not know are zero.
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
