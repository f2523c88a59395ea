// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver/library.h"

#include <dlfcn.h>

namespace tessera::cuda {

Library::Library(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL)), name_(name) {
  if (handle_ != nullptr) return;
  const char* why = dlerror();
  error_ = why != nullptr ? why : "cannot be opened";
}

Library Library::already_loaded(const std::string& name) {
  Library library;
  library.handle_ = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  library.name_ = name;
  return library;
}

void* Library::address(const char* symbol) const noexcept {
  return handle_ != nullptr ? dlsym(handle_, symbol) : nullptr;
}

std::string Library::path_of(const char* symbol) const {
  Dl_info info{};
  void* at = address(symbol);
  return at != nullptr && dladdr(at, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : name_;
}

}  // namespace tessera::cuda
