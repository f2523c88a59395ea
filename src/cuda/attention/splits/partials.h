// SPDX-License-Identifier: Apache-2.0
// The partial results of a forward with splits, in the workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shared/combine.h"
#include "shared/params.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The layout is (splits, …o) in fp32, then (splits, …lse).
struct Partials {
  std::int64_t o_part;  // elements
  std::int64_t lse_part;
  std::int64_t splits;

  Partials(const Problem& problem, std::int64_t count);
  [[nodiscard]] std::size_t o_bytes() const {
    return (static_cast<std::size_t>(o_part * splits) * sizeof(float) + 63) / 64 * 64;
  }
  [[nodiscard]] std::size_t bytes() const {
    return o_bytes() + static_cast<std::size_t>(lse_part * splits) * sizeof(float);
  }
};

/// Returns the bytes of partial results, which begin the workspace, in front of those of masses; 0 for one split.
std::size_t partials_bytes(const Problem& problem, std::int64_t splits);

/// Makes the forward write partial results to the workspace. Returns the parameters of the kernel that merges them into
/// the caller's tensors.
CombineParams redirect_to(const Partials& partials, std::byte* workspace, const Problem& problem, FwdParams& params);

}  // namespace tessera::cuda
