// SPDX-License-Identifier: Apache-2.0
// A shared library opened at run time.
#pragma once

#include <string>

namespace tessera::cuda {

class Library {
 public:
  Library() = default;
  /// `name`: a path, or a name for the system's loader. Empty (false) when it cannot be opened; error() says why.
  explicit Library(const std::string& name);
  /// The library if this process has loaded it already; empty otherwise.
  static Library already_loaded(const std::string& name);

  explicit operator bool() const noexcept { return handle_ != nullptr; }
  [[nodiscard]] const std::string& error() const noexcept { return error_; }
  /// The file that the loader has opened, or the requested name if that is unknown.
  [[nodiscard]] std::string path_of(const char* symbol) const;

  /// Sets `function` to the symbol, or to nullptr if there is none. Returns whether there is one.
  template <class Function>
  bool find(const char* symbol, Function*& function) const noexcept {
    function = reinterpret_cast<Function*>(address(symbol));
    return function != nullptr;
  }

  // Never closed: pointers to its functions live as long as the process.

 private:
  [[nodiscard]] void* address(const char* symbol) const noexcept;

  void* handle_ = nullptr;
  std::string name_;
  std::string error_;
};

}  // namespace tessera::cuda
