// SPDX-License-Identifier: Apache-2.0
// The text of a configuration in the source and the name of its kernel. Both follow from the list of its fields
// (visit_fields, in the struct in src/shared). If the list lacks a field, the code does not compile.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shared/types.h"

namespace tessera::cuda {

/// A field of one configuration.
struct FieldText {
  std::string_view name;
  std::string value;  // as C++ writes it: "64", "true", "Element::bf16"
  std::string word;   // as people read it: "64", "", "bf16"
  bool is_default;
};

/// Which fields words_of() writes: all, or those that differ from their defaults.
enum class Words { all, beyond_defaults };

FieldText field_text(std::string_view name, int value);
FieldText field_text(std::string_view name, bool value);
FieldText field_text(std::string_view name, Spelling value);
template <class Enum>
FieldText field_text(std::string_view name, Enum value) {
  return field_text(name, spelling(value));
}

/// "constexpr TYPE config{.name = value, …};\n", with the fields that differ from their defaults.
std::string configuration_line(std::string_view type, std::span<const FieldText> fields);
/// " name=64 other=bf16 flag …". Flags are written if they are on. If one is on by default, "flag=no" says that it is
/// off. `told`: fields that are left out.
std::string words_of(std::span<const FieldText> fields, Words which, std::initializer_list<std::string_view> told);

/// Converts to any type, so that fields can be counted.
struct AnyField {
  template <class T>
  constexpr operator T() const noexcept;  // NOLINT(google-explicit-constructor): it initialises fields
};

template <class Config>
concept Configuration = requires { Config::type_name(); };

/// How many fields the aggregate has.
template <class Config, class... Fields>
consteval int count_fields() {
  if constexpr (requires { Config{Fields{}..., AnyField{}}; }) {
    return count_fields<Config, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

/// How many fields visit_fields lists.
template <Configuration Config>
consteval int count_listed() {
  int count = 0;
  const Config config{};
  Config::visit_fields(config, [&count](const char* /*name*/, const auto& /*value*/) { ++count; });
  return count;
}

template <Configuration Config>
std::vector<FieldText> field_texts(const Config& config) {
  static_assert(count_fields<Config>() == count_listed<Config>(), "visit_fields lists every field of the struct");
  std::vector<FieldText> texts;
  Config::visit_fields(config, [&texts](const char* name, auto value) { texts.push_back(field_text(name, value)); });
  std::size_t i = 0;
  const Config defaults{};
  Config::visit_fields(defaults, [&](const char* name, auto value) {
    texts[i].is_default = field_text(name, value).value == texts[i].value;
    ++i;
  });
  return texts;
}

/// The line of a kernel's source that defines `config`.
template <Configuration Config>
std::string configuration_line(const Config& config) {
  return configuration_line(Config::type_name(), field_texts(config));
}

/// `told`: fields that are left out, because the name has them already.
template <Configuration Config>
std::string words_of(const Config& config, Words which, std::initializer_list<std::string_view> told = {}) {
  return words_of(field_texts(config), which, told);
}

}  // namespace tessera::cuda
