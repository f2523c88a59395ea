// SPDX-License-Identifier: Apache-2.0
// Masks of the user's that a kernel in front of attention evaluates once for all heads (masks/mark_mask.cuh).
#pragma once

#include <cstddef>

#include "cuda/jit/kernel.h"
#include "plan/kernel_source.h"
#include "shared/mask_tiles.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Whether attention can load the bits of the problem's mask: one that does not depend on the head, beside a list whose
/// blocks are whole ones of kMaskBlock and the same for all heads.
bool has_mask_bits(const Problem& problem);

/// The problem with a list of the tiles that its mask shows, where a kernel in front is to make one; else as it is.
Problem with_mask_list(const Problem& problem, const Wishes& wishes);

/// What has words of MaskBits: queries, whose bits tell of keys, or keys, whose bits tell of queries.
enum class MaskBitsOf { nothing, queries, keys };

/// The kernel in front of a plan, and what it writes.
class MaskTiles {
 public:
  MaskTiles() = default;
  /// `problem`: of with_mask_list(), which was `given` another.
  MaskTiles(const Problem& problem, const Problem& given, MaskBitsOf bits);

  /// Whether the plan has such a kernel.
  explicit operator bool() const noexcept { return batch_ > 0 && (config_.classifies || config_.keeps_bits); }
  [[nodiscard]] bool makes_list() const noexcept { return config_.classifies; }
  [[nodiscard]] std::size_t bytes() const noexcept;  // of the workspace
  [[nodiscard]] KernelSource source(const Problem& problem) const;

  /// Completes `list`, which holds the caller's unless the kernel makes it. `memory`: bytes() of the workspace.
  void complete(ListParams& list, std::byte* memory) const;
  /// `p` has the completed list.
  void launch(const Kernel& kernel, const AttentionParams& p, std::byte* memory, Stream stream) const;

 private:
  MaskTilesConfig config_{};
  std::int64_t batch_ = 0;
  std::int64_t queries_ = 0;  // of the longest sequence
  std::int64_t key_blocks_ = 0, second_block_ = 0;

  [[nodiscard]] std::int64_t words() const noexcept;
  [[nodiscard]] std::int64_t list_words() const noexcept;  // of one of the two
  [[nodiscard]] std::int64_t bit_rows() const noexcept;    // of a sequence
  [[nodiscard]] std::int64_t row_words() const noexcept;
  [[nodiscard]] MaskTilesParams params(std::byte* memory) const noexcept;
};

}  // namespace tessera::cuda
