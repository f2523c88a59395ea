// SPDX-License-Identifier: Apache-2.0
#include "problem/shared_checks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "problem/grammar.h"
#include "problem/operation.h"
#include "tessera/error.h"

namespace tessera::detail {

void refuse_field(std::string_view argument, std::string got, std::string want) {
  throw Error(ErrorCode::invalid_argument, std::string(argument), std::move(got), std::move(want));
}

void check_size(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse_field(name, std::to_string(value), std::to_string(least) + " or more");
  if (value > kMaxSize) {
    throw Error(ErrorCode::overflow, std::string(name), std::to_string(value), "at most " + std::to_string(kMaxSize));
  }
}

void check_head_dim(std::string_view name, std::int64_t dim) {
  if (dim % 8 != 0) refuse_field(name, std::to_string(dim), "a multiple of 8 from 8 to 512");
}

void check_scale(const Problem& p) {
  if (p.scale && !std::isfinite(*p.scale)) refuse_field("scale", std::to_string(*p.scale), "a finite number");
}

void check_bytes(std::string_view name, std::initializer_list<std::int64_t> sizes, std::int64_t element) {
  if (checked_extent(sizes, element)) return;
  std::string got = "sizes";
  for (const std::int64_t size : sizes) got += " " + std::to_string(size);
  throw Error(ErrorCode::overflow, std::string(name), got, "a byte count that fits in 64 bits");
}

void check_source(const Problem& p, const KvSource& kv, const std::string& name) {
  check_size(name + ".seqlen", kv.seqlen, 0);
  check_size(name + ".total", kv.total, 0);
  check_size(name + ".pages", kv.pages, 0);
  if (kv.layout != KvLayout::varlen && kv.total != 0) {
    refuse_field(name + ".total", std::to_string(kv.total), "0 unless the layout is varlen");
  }
  if (is_paged(kv.layout)) {
    check_size(name + ".page_size", kv.page_size, 1);
    if (kv.pages > std::numeric_limits<std::int32_t>::max()) {
      refuse_field(name + ".pages", std::to_string(kv.pages), "at most 2147483647, page ids are int32");
    }
  } else if (kv.page_size != 0 || kv.pages != 0) {
    refuse_field(name + ".page_size", std::to_string(kv.page_size) + " with " + std::to_string(kv.pages) + " pages",
                 "0 unless the layout is paged");
  }
  if (kv.layout == KvLayout::paged_table && !kv.seqused) {
    refuse_field(name + ".seqused", "false", "true for a page table, its lengths are bound");
  }
  const std::int64_t rows = kv.layout == KvLayout::dense ? kv.seqlen : kv.page_size;
  const std::int64_t outer = kv.layout == KvLayout::dense    ? p.batch
                             : kv.layout == KvLayout::varlen ? kv.total
                                                             : kv.pages;
  check_bytes(name, {outer, rows, p.heads_kv, std::max(p.head_dim_qk, p.head_dim_v)});
  check_bytes(name + ".seqlen", {p.batch, kv.seqlen, p.heads_kv});
}

void refuse_unused(const Problem& p, std::initializer_list<UnusedField> fields) {
  for (const UnusedField& field : fields) {
    if (field.set) {
      refuse_field(field.name, std::string(name_of(p.operation)), "another operation; this field has no meaning here");
    }
  }
}

}  // namespace tessera::detail
