// SPDX-License-Identifier: Apache-2.0
// The tensors of a case: N(0, 1) data where a run may read, NaN everywhere else, of a kind that the seed chooses
// (padding rows, page tails, unused pages, slack tokens, outputs, the bytes around each tensor), and the proof
// afterwards that nothing else was touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cases/inputs/numbers.h"
#include "cases/inputs/poison.h"
#include "cases/line/case.h"
#include "cpu/reference/reference.h"
#include "cpu/reference/sequences.h"
#include "tessera/executor.h"

namespace tessera::cases {

/// What 8-bit elements are of N(0, 1); their descales are about 1 over it.
inline constexpr double kQuantisedGain = 28;

class Inputs {
 public:
  /// For a backward, o and lse come from the oracle's forward, rounded to their types. Throws Error where the values do
  /// not fit the problem (more lengths than sequences, too few pages, …).
  explicit Inputs(const Case& of);
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  [[nodiscard]] const Bindings& bindings() const noexcept { return bindings_; }
  [[nodiscard]] Bindings& bindings() noexcept { return bindings_; }
  [[nodiscard]] bool is_output(Slot slot) const noexcept;

  /// The memory of one slot's tensor with what lies around it.
  struct BufferView {
    Slot slot;
    std::span<std::byte> bytes;
    std::size_t begin;  // of the bytes that the tensor spans
    std::size_t guard;  // bytes behind the tensor
  };
  [[nodiscard]] std::vector<BufferView> buffers();

  /// What every byte is now becomes what restore() goes back to and find_damage() compares with.
  void remember();
  void restore();
  /// "" if all bytes are as remembered except those of elements that `expected` marks as written; else what was hit.
  [[nodiscard]] std::string find_damage(const reference::Result& expected) const;

 private:
  struct Buffer {
    Slot slot;
    bool output;
    std::int64_t begin;  // of what the tensor spans
    PoisonedMemory memory;
    std::vector<std::byte> remembered;
  };

  Tensor& allocate(Slot slot, DType dtype, std::vector<std::int64_t> shape, bool output = false);
  Tensor& allocate_integers(Slot slot, const std::vector<std::int64_t>& values, DType dtype = DType::int32);
  [[nodiscard]] std::vector<std::int64_t> query_shape(std::int64_t heads, std::int64_t dim) const;
  [[nodiscard]] std::vector<std::int64_t> lse_shape() const;
  void fill(Slot slot);  // every element N(0, 1)
  void fill_queries(Slot slot);
  void fill_keys(std::size_t segment);
  void set_non_finite_keys();
  void set_non_finite_rows(Slot slot, std::int64_t parity);
  void fill_lse(Slot slot, double mean, double deviation, double share_empty);

  void bind_operation();
  void bind_by_rules();
  void bind_sources();
  void bind_attention();
  void bind_query_lengths();
  void bind_key_lengths(std::size_t segment);
  void bind_pages(std::size_t segment, const std::vector<std::int64_t>& lengths);
  void bind_offsets();
  void bind_keys(std::size_t segment);
  void bind_score_parameters();
  void bind_sinks();
  void bind_list(const TileList& list, bool backward);
  void bind_tile_outputs();
  void bind_skip();
  void bind_must(RandomNumbers& random);
  void bind_forward_result();
  void bind_gradients();
  void bind_combine();
  void bind_kv_append();
  void bind_linear_decode();
  void bind_linear_chunk();
  void bind_nsa_pool();
  void bind_nsa_select();
  void bind_nsa_gate();
  void bind_quantize();
  void bind_descales();
  void fill_query_descales(Slot slot, std::int64_t heads);
  void fill_key_descales(Slot slot);
  void shut_branches();
  [[nodiscard]] std::vector<std::int64_t> pooled_shape(std::int64_t dim) const;
  void fill_pooled(Slot slot);
  void bind_pool();
  void bind_ring();
  void bind_seeds();
  void bind_state_slots();
  void check_count(const char* name, const std::vector<std::int64_t>& list) const;

  Case case_;
  const Problem& problem_;
  const Values& values_;
  Bindings bindings_;
  reference::Sequences sequences_;
  std::vector<Buffer> buffers_;
};

}  // namespace tessera::cases
