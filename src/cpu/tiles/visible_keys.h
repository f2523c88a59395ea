// SPDX-License-Identifier: Apache-2.0
// Windows, chunks and the compressed causal mask as a range of keys.
#pragma once

#include <cstdint>

#include "tessera/problem.h"

namespace tessera::cpu {

/// Inclusive range of key positions that a query at `position` may see under window, compressed causal and chunks;
/// empty: low > high. Both ends grow with the position.
struct Visible {
  std::int64_t low;
  std::int64_t high;
};
Visible visible_keys(const Problem& problem, std::int64_t position);
inline bool has_window(const Problem& problem) {
  return problem.window.left || problem.window.right || problem.compressed_causal || problem.chunk > 0;
}

}  // namespace tessera::cpu
