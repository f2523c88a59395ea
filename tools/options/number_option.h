// SPDX-License-Identifier: Apache-2.0
// Options that take numbers. CLI11's own conversions turn -1 into 2^64 - 1, cut off what does not fit and read 010
// as 8.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <string>
#include <type_traits>

#include "tessera/error.h"

namespace tessera::cli {

/// An option for a decimal number from `least` to `most`; anything else is an Error{invalid_argument} that names it.
template <class T>
CLI::Option* add_number(CLI::App& verb, const std::string& names, T& value, std::type_identity_t<T> least,
                        std::type_identity_t<T> most, const std::string& description) {
  const std::string name = names.substr(names.find("--"));
  const auto read = [&value, least, most, name](const std::string& text) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    // Negated: NaN is in no range.
    if (error == std::errc() && rest == end && !text.empty() && value >= least && value <= most) return;
    throw Error(ErrorCode::invalid_argument, name, "'" + text + "'",
                fmt::format("{} from {} to {}", std::is_integral_v<T> ? "an integer" : "a number", least, most));
  };
  return verb.add_option_function<std::string>(names, read, description)
      ->type_name(std::is_integral_v<T> ? "INT" : "FLOAT");
}

}  // namespace tessera::cli
