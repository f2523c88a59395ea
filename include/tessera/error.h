// SPDX-License-Identifier: Apache-2.0
// The one way Tessera fails: an Error that names the argument, what was got and what is wanted.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

enum class ErrorCode {
  invalid_argument = 1,  // a value, shape, dtype, stride, alignment or overlap that is wrong in itself
  unsupported = 2,       // well formed, but no implementation does it
  out_of_range = 3,      // an index, length, page id or list entry outside what it addresses
  overflow = 4,          // a product of sizes does not fit in 64 bits
  parse = 5,             // text or file that does not follow its grammar
  io = 6,                // a file that cannot be opened, read or written
  internal = 7,          // a defect in Tessera
  cancelled = 9,         // an InterruptCheck ended the run; 8 is the C ABI's "out of memory"
};

/// Name of a code as printed in messages and returned by the C ABI ("invalid argument", …).
std::string_view to_string(ErrorCode code);

class Error : public std::exception {
 public:
  /// `argument` is the name the caller knows ("k", "cu_seqlens_q", "head_dim_qk").
  /// what() reads "<argument>: got <got>; want <want>".
  Error(ErrorCode code, std::string argument, std::string got, std::string want);

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& argument() const noexcept { return argument_; }
  [[nodiscard]] const std::string& got() const noexcept { return got_; }
  [[nodiscard]] const std::string& want() const noexcept { return want_; }
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

 private:
  ErrorCode code_;
  std::string argument_;
  std::string got_;
  std::string want_;
  std::string text_;
};

/// Whether something can be done, and if not, why.
struct Support {
  bool ok = true;
  std::string reason;

  static Support yes() { return {}; }
  static Support no(std::string why) { return {false, std::move(why)}; }
  explicit operator bool() const noexcept { return ok; }
};

}  // namespace tessera
