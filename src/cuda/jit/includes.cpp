// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/includes.h"

#include <algorithm>
#include <set>

namespace tessera::cuda {
namespace {

std::string_view without_blanks(std::string_view line) {
  return line.substr(std::min(line.find_first_not_of(" \t"), line.size()));
}

/// The name in a line `#include "name"`, blanks allowed between its parts; "" of other lines.
std::string_view included_name(std::string_view line) {
  constexpr std::string_view kInclude = "include";
  line = without_blanks(line);
  if (!line.starts_with('#')) return "";
  line = without_blanks(line.substr(1));
  if (!line.starts_with(kInclude)) return "";
  line = without_blanks(line.substr(kInclude.size()));
  if (!line.starts_with('"')) return "";
  line.remove_prefix(1);
  return line.substr(0, line.find('"'));
}

}  // namespace

std::vector<std::string_view> included_names(std::string_view text) {
  std::vector<std::string_view> names;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (const std::string_view name = included_name(line); !name.empty()) names.push_back(name);
  }
  return names;
}

Includes::Includes(std::span<const Header> headers) {
  for (const Header& header : headers) {
    files_[header.name] = {Sha256().add_text(header.text).digest(), included_names(header.text)};
  }
}

std::vector<std::string_view> Includes::of(std::string_view source) const {
  std::set<std::string_view> found;
  std::vector<std::string_view> open = included_names(source);
  while (!open.empty()) {
    const auto file = files_.find(open.back());
    open.pop_back();
    if (file == files_.end() || !found.insert(file->first).second) continue;
    open.insert(open.end(), file->second.includes.begin(), file->second.includes.end());
  }
  return {found.begin(), found.end()};
}

Digest Includes::digest(std::string_view source) const {
  Sha256 hash;
  for (const std::string_view name : of(source)) {
    const Digest& text = files_.at(name).digest;
    hash.add_text(name).add(text.data(), text.size());
  }
  return hash.digest();
}

const Includes& embedded_includes() {
  static const Includes includes(embedded_headers());
  return includes;
}

}  // namespace tessera::cuda
