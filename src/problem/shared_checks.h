// SPDX-License-Identifier: Apache-2.0
// What the checks of operations are made of. Arguments in errors are the names of Problem's fields.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tessera/problem.h"

namespace tessera::detail {

[[noreturn]] void refuse_field(std::string_view argument, std::string got, std::string want);
/// From `least` to the largest size there is.
void check_size(std::string_view name, std::int64_t value, std::int64_t least);
/// A multiple of 8; all operations have rows of 1 to 512 elements.
void check_head_dim(std::string_view name, std::int64_t dim);
/// Finite, if it is given.
void check_scale(const Problem& problem);
/// The product times the bytes of an element (8 stand for any) fits in 64 bits.
void check_bytes(std::string_view name, std::initializer_list<std::int64_t> sizes, std::int64_t element = 8);

/// Capacities that belong to the layout, and tensors whose bytes can be counted. `name`: "kv" or "kv2".
void check_source(const Problem& problem, const KvSource& kv, const std::string& name);

/// A field that some operations share and this one has no use for.
struct UnusedField {
  std::string_view name;
  bool set;
};
void refuse_unused(const Problem& problem, std::initializer_list<UnusedField> fields);

}  // namespace tessera::detail
