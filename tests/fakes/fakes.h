// SPDX-License-Identifier: Apache-2.0
// Puts the stand-ins in place of libcuda and NVRTC, for the rest of the process.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "fakes/cuda.h"

namespace tessera::testing {

inline std::string fake_nvrtc_path() { return std::string(TESSERA_FAKES) + "/libnvrtc.so.12"; }

template <class Function>
Function* fake_symbol(const std::string& path, const char* name) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* function = library != nullptr ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
  if (function == nullptr) throw std::runtime_error(path + " has no " + name);
  return function;
}

/// Compilations by the stand-in of NVRTC in this process.
inline int fake_compilations() {
  static auto* const count = fake_symbol<int()>(fake_nvrtc_path(), "fake_nvrtc_compilations");
  return count();
}

/// Which 12.x the stand-in of NVRTC says it is, from the next set_nvrtc on.
inline void set_fake_nvrtc_minor_version(int minor) {
  fake_symbol<void(int)>(fake_nvrtc_path(), "fake_nvrtc_set_minor_version")(minor);
}

/// To be called before anything opens the driver: a library of that name is then loaded already.
inline FakeCuda& use_fake_cuda() {
  static auto* const state = fake_symbol<FakeCuda*()>(std::string(TESSERA_FAKES) + "/libcuda.so.1", "fake_cuda");
  return *state();
}

}  // namespace tessera::testing
