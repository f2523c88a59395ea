// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles/arena.h"

#include <limits>
#include <string>

#include "base/checked.h"
#include "tessera/error.h"

namespace tessera::cpu {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr auto kMost = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) / kAlignment * kAlignment;

}  // namespace

void Arena::reserve(std::initializer_list<std::int64_t> sizes, std::size_t element) {
  std::optional<std::int64_t> bytes = static_cast<std::int64_t>(element);
  for (const std::int64_t size : sizes) bytes = bytes ? detail::checked_multiply(*bytes, size) : bytes;
  if (!bytes || static_cast<std::size_t>(*bytes) > kMost - used_) {
    std::string got;
    for (const std::int64_t size : sizes) got += (got.empty() ? "a buffer of " : " x ") + std::to_string(size);
    got += " elements of " + std::to_string(element) + " bytes behind " + std::to_string(used_) + " bytes";
    throw Error(ErrorCode::overflow, "workspace", got, "a byte count that fits in 64 bits");
  }
  used_ += (static_cast<std::size_t>(*bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace tessera::cpu
