// SPDX-License-Identifier: Apache-2.0
// Building blocks for the checks of operations. Arguments in errors are the names of Problem's fields.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tessera/problem.h"

namespace tessera::detail {

[[noreturn]] void refuse_field(std::string_view argument, std::string got, std::string want);
/// The value is from `least` to kMaxSize.
void check_size(std::string_view name, std::int64_t value, std::int64_t least);
/// The dimension is a multiple of 8. For all operations, problem.cpp has checked that it is from 1 to 512.
void check_head_dim(std::string_view name, std::int64_t dim);
/// The scale is finite, if it is given.
void check_scale(const Problem& problem);
/// The product of the sizes and of `element`, in bytes, fits in 64 bits. 8 bytes is the widest element.
void check_bytes(std::string_view name, std::initializer_list<std::int64_t> sizes, std::int64_t element = 8);

/// Capacities that the layout does not have are 0, and the tensors' byte counts fit in 64 bits. `name`: "kv" or "kv2".
void check_source(const Problem& problem, const KvSource& kv, const std::string& name);

/// A field of other operations that this one does not have.
struct UnusedField {
  std::string_view name;
  bool set;
};
void refuse_unused(const Problem& problem, std::initializer_list<UnusedField> fields);

}  // namespace tessera::detail
