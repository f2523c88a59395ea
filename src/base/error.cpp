// SPDX-License-Identifier: Apache-2.0
#include "tessera/error.h"

namespace tessera {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::out_of_range:
      return "out of range";
    case ErrorCode::overflow:
      return "overflow";
    case ErrorCode::parse:
      return "parse error";
    case ErrorCode::io:
      return "input/output error";
    case ErrorCode::internal:
      return "internal error";
    case ErrorCode::cancelled:
      return "cancelled";
  }
  return "unknown error";
}

Error::Error(ErrorCode code, std::string argument, std::string got, std::string want)
    : code_(code), argument_(std::move(argument)), got_(std::move(got)), want_(std::move(want)) {
  text_.reserve(argument_.size() + got_.size() + want_.size() + 16);
  text_.append(argument_).append(": got ").append(got_).append("; want ").append(want_);
}

}  // namespace tessera
