// SPDX-License-Identifier: Apache-2.0
#include "files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "files/safetensors_types.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;  // bytes, the format's own limit
constexpr int kMaxDepth = 3;                       // { tensor: { shape: [ … ] } }

[[noreturn]] void fail(std::string_view file, const std::string& got, const std::string& want) {
  throw Error(ErrorCode::parse, std::string(file), got, want);
}

std::uint64_t read_length(std::span<const std::byte> file, std::string_view name) {
  if (file.size() < 8) fail(name, std::to_string(file.size()) + " bytes", "a .safetensors file of at least 8");
  std::uint64_t length = 0;
  for (std::size_t at = 8; at-- > 0;) length = length << 8U | std::to_integer<std::uint64_t>(file[at]);
  if (length > kMaxHeader) fail(name, "a header of " + std::to_string(length) + " bytes", "at most 100000000");
  if (length > file.size() - 8) {
    fail(name, "a header of " + std::to_string(length) + " bytes in a file of " + std::to_string(file.size()),
         "the whole header");
  }
  return length;
}

// JSON with a limit on depth and no key twice in one object.
json parse_json(std::span<const std::byte> text, std::string_view name) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= kMaxDepth) fail(name, "a header nested deeper than " + std::to_string(kMaxDepth), "at most that");
      keys.resize(static_cast<std::size_t>(depth) + 1);
      keys.back().clear();
    } else if (event == json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      if (!keys[static_cast<std::size_t>(depth) - 1].insert(key).second)
        fail(name, "key '" + key + "' twice", "each once");
    }
    return true;
  };
  const char* begin = reinterpret_cast<const char*>(text.data());
  if (text.empty() || *begin != '{') fail(name, "a header that does not begin with '{'", "a JSON object");
  try {
    return json::parse(begin, begin + text.size(), check);
  } catch (const json::exception& error) {
    fail(name, std::string("a header that is no JSON (") + error.what() + ")", "a JSON object");
  }
}

std::uint64_t read_size(const json& value, std::string_view file, const std::string& what) {
  constexpr std::uint64_t kMost = (std::uint64_t{1} << 63U) - 1;
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMost) {
    fail(file, what + " " + value.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 40),
         "an integer from 0 to 2^63 - 1");
  }
  return value.get<std::uint64_t>();
}

SafetensorsEntry read_entry(const std::string& tensor, const json& value, std::string_view file) {
  const std::string what = "tensor '" + tensor + "'";
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    fail(file, what + " with other keys", "dtype, shape and data_offsets");
  }
  const json& type = value["dtype"];
  const json& shape = value["shape"];
  const json& offsets = value["data_offsets"];
  if (!type.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2) {
    fail(file, what + " with values of other kinds", "a string, a list and a list of two");
  }
  SafetensorsEntry entry;
  entry.name = tensor;
  entry.type = type.get<std::string>();
  const auto known = std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                                  [&](const SafetensorsType& row) { return row.name == entry.type; });
  if (known == kSafetensorsTypes.end()) fail(file, what + " of type '" + entry.type + "'", "a type of the format");
  entry.dtype = known->dtype;
  for (const json& size : shape) {
    entry.shape.push_back(static_cast<std::int64_t>(read_size(size, file, what + ": size")));
  }
  entry.begin = read_size(offsets[0], file, what + ": offset");
  entry.end = read_size(offsets[1], file, what + ": offset");
  const auto bytes = static_cast<std::size_t>(
      checked_bytes(entry.shape, known->bytes, std::string(file) + ": tensor '" + tensor + "'"));
  if (entry.end < entry.begin || entry.end - entry.begin != bytes) {
    fail(file, what + " at bytes " + std::to_string(entry.begin) + " to " + std::to_string(entry.end),
         std::to_string(bytes) + " bytes for " + entry.type + " " + describe_shape(entry.shape));
  }
  return entry;
}

void read_metadata(const json& value, std::string_view file, std::map<std::string, std::string>& metadata) {
  if (!value.is_object()) fail(file, "__metadata__ that is no object", "an object of strings");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) fail(file, "__metadata__ '" + key + "' that is no string", "an object of strings");
    metadata[key] = text.get<std::string>();
  }
}

// Every byte of the data belongs to exactly one tensor.
void check_cover(std::vector<SafetensorsEntry>& entries, std::size_t data_bytes, std::string_view file) {
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::size_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered) {
      fail(file, "tensor '" + entry.name + "' from byte " + std::to_string(entry.begin),
           "from byte " + std::to_string(covered) + ", where the one before it ends");
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    fail(file, std::to_string(data_bytes) + " bytes of data", std::to_string(covered) + ", the end of the last tensor");
  }
}

}  // namespace

const SafetensorsEntry* SafetensorsHeader::find(std::string_view name) const noexcept {
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view name) {
  const std::size_t length = read_length(file, name);
  const json object = parse_json(file.subspan(8, length), name);
  SafetensorsHeader header;
  header.data_offset = 8 + length;
  for (const auto& [key, value] : object.items()) {
    if (key == "__metadata__") {
      read_metadata(value, name, header.metadata);
    } else {
      header.entries.push_back(read_entry(key, value, name));
    }
  }
  check_cover(header.entries, file.size() - header.data_offset, name);
  return header;
}

Array copy_tensor(std::span<const std::byte> file, const SafetensorsHeader& header, const SafetensorsEntry& entry,
                  std::string_view name) {
  const std::string what = std::string(name) + ": tensor '" + entry.name + "'";
  if (!entry.dtype)
    throw Error(ErrorCode::unsupported, what, "type " + entry.type, "a type that tensors here can have");
  Array array(*entry.dtype, entry.shape, what);
  if (array.size_bytes() != 0) {
    std::memcpy(array.data(), file.data() + header.data_offset + entry.begin, array.size_bytes());
  }
  return array;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), file_(path), header_(parse_safetensors_header(file_.bytes(), path)) {}

Array SafetensorsFile::load(std::string_view tensor) const {
  const SafetensorsEntry* entry = header_.find(tensor);
  if (entry == nullptr) fail(path_, "no tensor '" + std::string(tensor) + "'", "a file that holds it");
  return copy_tensor(file_.bytes(), header_, *entry, path_);
}

}  // namespace tessera::files
