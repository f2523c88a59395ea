// SPDX-License-Identifier: Apache-2.0
#include "files/npy.h"

#include <charconv>
#include <cstring>
#include <optional>

#include "files/bytes.h"
#include "files/npy_types.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

constexpr std::size_t kMaxNpyHeader = 1U << 20U;  // bytes; a header of six dimensions has about 200

// Reads the header: a Python dictionary literal with exactly the keys descr, fortran_order and shape.
class DictionaryReader {
 public:
  DictionaryReader(std::string_view text, std::string_view name) : text_(text), name_(name) {}

  NpyHeader read() {
    expect('{');
    while (!accept('}')) {
      read_item();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) fail("'" + rest() + "' after the dictionary", "nothing");
    if (!dtype_ || !fortran_ || !shape_) fail("a header without all of its keys", "descr, fortran_order and shape");
    if (*fortran_ && shape_->size() > 1) fail("fortran_order True", "row-major data (numpy.ascontiguousarray)");
    return {*dtype_, *shape_, 0};
  }

 private:
  [[noreturn]] void fail(const std::string& got, const std::string& want) const {
    throw Error(ErrorCode::parse, std::string(name_), got, want);
  }
  [[nodiscard]] std::string rest() const { return std::string(text_.substr(at_, 16)); }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool accept(char letter) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != letter) return false;
    ++at_;
    return true;
  }
  void expect(char letter) {
    if (!accept(letter)) fail("header '" + rest() + "'", std::string("'") + letter + "'");
  }
  bool accept_word(std::string_view word) {
    skip_space();
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  std::string_view read_string() {
    const char quote = accept('\'') ? '\'' : '"';
    if (quote == '"') expect('"');
    const std::size_t end = text_.find(quote, at_);
    if (end == std::string_view::npos) fail("a string without its end", "a closing quote");
    const std::string_view value = text_.substr(at_, end - at_);
    at_ = end + 1;
    return value;
  }

  void read_item() {
    const std::string_view key = read_string();
    expect(':');
    if (key == "descr" && !dtype_) {
      read_type();
    } else if (key == "fortran_order" && !fortran_) {
      if (accept_word("True")) {
        fortran_ = true;
      } else if (accept_word("False")) {
        fortran_ = false;
      } else {
        fail("fortran_order '" + rest() + "'", "True or False");
      }
    } else if (key == "shape" && !shape_) {
      read_shape();
    } else {
      fail("key '" + std::string(key) + "'", "descr, fortran_order and shape, once each");
    }
  }

  void read_type() {
    skip_space();
    if (at_ < text_.size() && text_[at_] == '[') fail("a structured type", "one number an element");
    const std::string_view descr = read_string();
    for (const NpyType& type : kNpyTypes) {
      if (type.descr == descr) dtype_ = type.dtype;
    }
    if (!dtype_) {
      fail("type '" + std::string(descr) + "'", "little-endian f2, f4, f8, i1, i4, i8, u1, u4, u8 or V2 (bf16)");
    }
  }

  void read_shape() {
    std::vector<std::int64_t> shape;
    expect('(');
    while (!accept(')')) {
      skip_space();
      std::int64_t size = 0;
      const char* begin = text_.data() + at_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), size);
      if (error != std::errc{} || size < 0) fail("size '" + rest() + "'", "an integer from 0 to 2^63 - 1");
      at_ += static_cast<std::size_t>(end - begin);
      shape.push_back(size);
      if (shape.size() > static_cast<std::size_t>(Tensor::kMaxRank)) {
        fail("more than " + std::to_string(Tensor::kMaxRank) + " dimensions",
             "at most " + std::to_string(Tensor::kMaxRank));
      }
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    shape_ = std::move(shape);
  }

  std::string_view text_;
  std::string_view name_;
  std::size_t at_ = 0;
  std::optional<DType> dtype_;
  std::optional<bool> fortran_;
  std::optional<std::vector<std::int64_t>> shape_;
};

std::size_t little_endian(std::span<const std::byte> bytes) {
  std::size_t value = 0;
  for (std::size_t at = bytes.size(); at-- > 0;) value = value << 8U | std::to_integer<std::size_t>(bytes[at]);
  return value;
}

}  // namespace

NpyHeader parse_npy_header(std::span<const std::byte> file, std::string_view name) {
  const auto fail = [name](std::string got, std::string want) {
    throw Error(ErrorCode::parse, std::string(name), std::move(got), std::move(want));
  };
  if (file.size() < 10) fail(std::to_string(file.size()) + " bytes", "a .npy file of at least 10");
  if (std::memcmp(file.data(), kNpyMagic.data(), kNpyMagic.size()) != 0) fail("another magic", "\\x93NUMPY");
  const auto major = std::to_integer<unsigned>(file[6]);
  if (major < 1 || major > 3) fail("version " + std::to_string(major), "version 1, 2 or 3");
  const std::size_t width = major == 1 ? 2 : 4;
  if (file.size() < 8 + width) fail(std::to_string(file.size()) + " bytes", "the length of the header");
  const std::size_t length = little_endian(file.subspan(8, width));
  if (length > kMaxNpyHeader) fail("a header of " + std::to_string(length) + " bytes", "at most 2^20");
  if (length > file.size() - 8 - width) {
    fail("a header of " + std::to_string(length) + " bytes in a file of " + std::to_string(file.size()),
         "the whole header");
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8 + width, length);
  NpyHeader header = DictionaryReader(text, name).read();
  header.data_offset = 8 + width + length;
  const std::int64_t want = checked_bytes(header.shape, size_of(header.dtype), name);
  const std::size_t got = file.size() - header.data_offset;
  if (got != static_cast<std::size_t>(want)) {
    fail(std::to_string(got) + " bytes of data",
         std::to_string(want) + " for " + std::string(to_string(header.dtype)) + " " + describe_shape(header.shape));
  }
  return header;
}

Array parse_npy(std::span<const std::byte> file, std::string_view name) {
  const NpyHeader header = parse_npy_header(file, name);
  Array array(header.dtype, header.shape, name);
  if (array.size_bytes() != 0) std::memcpy(array.data(), file.data() + header.data_offset, array.size_bytes());
  return array;
}

Array read_npy(const std::string& path) {
  const MappedFile file(path);
  return parse_npy(file.bytes(), path);
}

}  // namespace tessera::files
