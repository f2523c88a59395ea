// SPDX-License-Identifier: Apache-2.0
// Users' masks that a kernel before attention evaluates once for all heads (masks/mark_mask.cuh).
#pragma once

#include <cstddef>

#include "cuda/jit/kernel.h"
#include "plan/kernel_source.h"
#include "shared/mask_tiles.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Whether attention can load bits of the problem's mask: the mask does not depend on the head, and there is a list
/// that is the same for all heads and whose blocks are multiples of kMaskBlock.
bool has_mask_bits(const Problem& problem);

/// Returns the problem with a list of the tiles in which its mask shows elements, if a kernel before attention is to
/// make that list; else the same problem.
Problem with_mask_list(const Problem& problem, const Wishes& wishes);

/// What a row of MaskBits belongs to: a query, with bits for keys, or a key, with bits for queries.
enum class MaskBitsOf { nothing, queries, keys };

/// The kernel that evaluates the mask before a plan's attention, and what it writes.
class MaskTiles {
 public:
  MaskTiles() = default;
  /// `problem`: what with_mask_list() has returned for `given`.
  MaskTiles(const Problem& problem, const Problem& given, MaskBitsOf bits);

  /// Whether the plan has such a kernel.
  explicit operator bool() const noexcept { return batch_ > 0 && (config_.classifies || config_.keeps_bits); }
  [[nodiscard]] bool makes_list() const noexcept { return config_.classifies; }
  [[nodiscard]] std::size_t bytes() const noexcept;  // of the workspace
  [[nodiscard]] KernelSource source(const Problem& problem) const;

  /// Adds to `list` what the kernel writes: mask bits and, if it makes the list, the list itself. `memory`: bytes() of
  /// the workspace.
  void complete(ListParams& list, std::byte* memory) const;
  /// `p` has the completed list.
  void launch(const Kernel& kernel, const AttentionParams& p, std::byte* memory, Stream stream) const;

 private:
  MaskTilesConfig config_{};
  std::int64_t batch_ = 0;
  std::int64_t queries_ = 0;  // of the longest sequence
  std::int64_t key_blocks_ = 0, second_block_ = 0;

  [[nodiscard]] std::int64_t words() const noexcept;
  [[nodiscard]] std::int64_t list_words() const noexcept;  // of `visible`, and of `full`
  [[nodiscard]] std::int64_t bit_rows() const noexcept;    // of a sequence
  [[nodiscard]] std::int64_t row_words() const noexcept;
  [[nodiscard]] MaskTilesParams params(std::byte* memory) const noexcept;
};

}  // namespace tessera::cuda
