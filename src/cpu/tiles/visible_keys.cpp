// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles/visible_keys.h"

#include <algorithm>
#include <limits>

namespace tessera::cpu {
namespace {

/// Floor of a / b for b > 0.
std::int64_t divide_down(std::int64_t a, std::int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

}  // namespace

Visible visible_keys(const Problem& problem, std::int64_t position) {
  Visible range{std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};
  // Offsets and positions are bounded by Problem::check and validate, so that the sums cannot overflow.
  if (problem.window.left) range.low = position - *problem.window.left;
  if (problem.window.right) range.high = position + *problem.window.right;
  if (problem.compressed_causal) {
    const std::int64_t room = position + 1 - problem.compressed_causal->length;  // j·stride ≤ room
    range.high = std::min(range.high, divide_down(room, problem.compressed_causal->stride));
  }
  if (problem.chunk > 0) {
    const std::int64_t first = divide_down(position, problem.chunk) * problem.chunk;
    range.low = std::max(range.low, first);
    range.high = std::min(range.high, first + problem.chunk - 1);
  }
  return range;
}

}  // namespace tessera::cpu
