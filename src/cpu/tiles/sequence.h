// SPDX-License-Identifier: Apache-2.0
// Finds the rows of one sequence: lengths, positions and addresses in every layout (dense, varlen, paged). Bindings are
// validated before.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/simd/kernels.h"
#include "tessera/executor.h"

namespace tessera::cpu {

/// Rows of q, o, dout, dq of one sequence.
struct RowView {
  std::byte* base = nullptr;
  std::ptrdiff_t row = 0;  // bytes
  std::ptrdiff_t head = 0;
  [[nodiscard]] std::byte* at(std::int64_t index, std::int64_t h) const { return base + index * row + h * head; }
};

/// LSE-shaped fp32 values of one sequence.
struct ScalarView {
  float* base = nullptr;
  std::ptrdiff_t row = 0;  // elements
  std::ptrdiff_t head = 0;
  [[nodiscard]] float& at(std::int64_t index, std::int64_t h) const { return base[index * row + h * head]; }
};

/// Rows of k, v, dk or dv of one segment of one sequence, paged or not.
struct KeyView {
  std::byte* base = nullptr;
  std::ptrdiff_t row = 0;  // bytes between tokens (of a page)
  std::ptrdiff_t head = 0;
  const std::int32_t* pages = nullptr;  // nullptr: contiguous
  std::int64_t page_size = 1;
  std::ptrdiff_t page = 0;  // bytes between pages
  [[nodiscard]] std::byte* at(std::int64_t index, std::int64_t h) const {
    if (pages == nullptr) return base + index * row + h * head;
    return base + pages[index / page_size] * page + index % page_size * row + h * head;
  }
  /// How many of `count` keys from `index` on are `row` bytes apart.
  [[nodiscard]] std::int64_t run(std::int64_t index, std::int64_t count) const {
    return pages == nullptr ? count : std::min(count, page_size - index % page_size);
  }
};

/// Descales of 8-bit keys of one segment of one sequence, or of its query rows. Without a base every descale is 1.
struct DescaleView {
  const float* base = nullptr;
  std::ptrdiff_t step = 0;  // elements between the descales of two rows or blocks
  std::ptrdiff_t head = 0;
  std::int64_t block = 1;               // rows that share a descale
  const std::int32_t* pages = nullptr;  // as in KeyView
  std::int64_t page_size = 1;
  std::ptrdiff_t page = 0;
  [[nodiscard]] float at(std::int64_t index, std::int64_t h) const {
    if (base == nullptr) return 1.0F;
    if (pages == nullptr) return base[index / block * step + h * head];
    return base[pages[index / page_size] * page + index % page_size / block * step + h * head];
  }
};

struct Segment {
  std::int64_t length = 0;    // keys used
  std::int64_t capacity = 0;  // keys in the tensor for this sequence; those past length get zero gradients
  std::int64_t position = 0;  // of key 0
  KeyView k, v;
  DescaleView k_descale, v_descale;
};

struct Sequence {
  std::int64_t batch = 0;
  std::int64_t q_length = 0;         // rows used
  std::int64_t q_capacity = 0;       // rows in the tensor; those past q_length are padding
  std::int64_t q_first = 0;          // varlen: token of row 0; dense: batch · seqlen_q
  std::int64_t q_position = 0;       // of row 0
  DescaleView q_descale;             // by group or head: see find_sequence
  std::int64_t q_descale_heads = 1;  // query heads that share a descale
  const float* k_mean = nullptr;     // (hkv, d) of the sequence, added to every key
  std::ptrdiff_t k_mean_head = 0;
  std::array<Segment, 2> segments;
  [[nodiscard]] float query_descale(std::int64_t index, std::int64_t h) const {
    return q_descale.at(index, h / q_descale_heads);
  }
  [[nodiscard]] std::int64_t keys() const { return segments[0].length + segments[1].length; }
};

/// Only the query side: rows, lengths, first token.
Sequence find_query_rows(const Problem& problem, const Bindings& bindings, std::int64_t batch);
Sequence find_sequence(const Problem& problem, const Bindings& bindings, std::int64_t batch);

/// A q-shaped tensor's rows of a sequence; unbound tensors give a null view.
RowView rows_of(const Problem& problem, const Tensor& tensor, const Sequence& sequence);
ScalarView scalars_of(const Problem& problem, const Tensor& tensor, const Sequence& sequence);
/// A k-shaped tensor (k, v, dk, dv) of a segment.
KeyView keys_of(const Problem& problem, const Bindings& bindings, const Tensor& tensor, int segment,
                std::int64_t batch);

/// Loads keys [first, first + count) of a head in fp32, into rows padded to the internal width.
void load_keys(const Kernels& kernels, const KeyView& view, DType dtype, std::int64_t dim, std::int64_t first,
               std::int64_t count, std::int64_t head, float* target);
/// Multiplies such rows by their descales and adds `mean` (dim), if there is one.
void dequantise_keys(const Kernels& kernels, const DescaleView& descales, const float* mean, std::int64_t dim,
                     std::int64_t first, std::int64_t count, std::int64_t head, float* rows);

}  // namespace tessera::cpu
