// SPDX-License-Identifier: Apache-2.0
#include "cuda/source/configuration_text.h"

#include <algorithm>

namespace tessera::cuda {

FieldText field_text(std::string_view name, int value) {
  return {name, std::to_string(value), std::to_string(value), false};
}

FieldText field_text(std::string_view name, bool value) {
  return {name, value ? "true" : "false", value ? "" : "no", false};
}

FieldText field_text(std::string_view name, Spelling value) {
  return {name, std::string(value.type) + "::" + value.word, value.word, false};
}

std::string configuration_line(std::string_view type, std::span<const FieldText> fields) {
  std::string initialiser;
  for (const FieldText& field : fields) {
    if (field.is_default) continue;
    initialiser += (initialiser.empty() ? "." : ", .") + std::string(field.name) + " = " + field.value;
  }
  return "constexpr " + std::string(type) + " config{" + initialiser + "};\n";
}

std::string words_of(std::span<const FieldText> fields, Words which, std::initializer_list<std::string_view> told) {
  std::string words;
  for (const FieldText& field : fields) {
    const bool is_off = field.value == "false";
    if (field.is_default && (which == Words::beyond_defaults || is_off)) continue;
    if (std::find(told.begin(), told.end(), field.name) != told.end()) continue;
    words += " " + std::string(field.name) + (field.word.empty() ? "" : "=" + field.word);
  }
  return words;
}

}  // namespace tessera::cuda
