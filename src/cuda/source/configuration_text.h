// SPDX-License-Identifier: Apache-2.0
// A configuration as its kernel's source and name have it. Both follow from the list of its fields (visit_fields, in
// src/shared beside the struct): a field that is missing there does not compile.
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

/// Which fields a name has besides those that are told elsewhere in it.
enum class Words { all, beyond_defaults };

FieldText field_text(std::string_view name, int value);
FieldText field_text(std::string_view name, bool value);
FieldText field_text(std::string_view name, Spelling value);
template <class Enum>
FieldText field_text(std::string_view name, Enum value) {
  return field_text(name, spelling(value));
}

/// "constexpr TYPE config{.name = value, …};\n", of fields that are not as the struct has them by default.
std::string configuration_line(std::string_view type, std::span<const FieldText> fields);
/// " name=64 other=bf16 flag …"; of flags those that are on, and "flag=no" of one that is on by default.
std::string words_of(std::span<const FieldText> fields, Words which, std::initializer_list<std::string_view> told);

/// Stands for a value of any type where fields are counted.
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

/// How many its visit_fields lists.
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

/// `told`: fields that the name has already.
template <Configuration Config>
std::string words_of(const Config& config, Words which, std::initializer_list<std::string_view> told = {}) {
  return words_of(field_texts(config), which, told);
}

}  // namespace tessera::cuda
