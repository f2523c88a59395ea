// SPDX-License-Identifier: Apache-2.0
#include "cases/compare_skip.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

double code_of(double mass) { return mass <= 0 ? 0 : std::clamp(std::round(8 * std::log2(mass)) + 239, 0.0, 255.0); }

/// One row of a state's list.
struct Row {
  std::int64_t index;  // of all rows
  double threshold;
};

std::string compare_memory(std::size_t tile, double code, const reference::Result& oracle, double allowed) {
  const double mass = oracle.next_mass[tile];
  if (std::isnan(mass)) {  // not computed: exact
    const double want = oracle[Slot::skip_memory].values[tile];
    return code == want ? "" : fmt::format("skip_memory: tile {}, not computed: got {}, want {}", tile, code, want);
  }
  if (code >= code_of(mass - allowed) && code <= code_of(mass + allowed)) return "";
  return fmt::format("skip_memory: tile {} of mass {:.9g} within {:.3g}: got {}, want {}", tile, mass, allowed, code,
                     code_of(mass));
}

std::string compare_row(const Problem& problem, const Bindings& got, const reference::Result& oracle, double allowed,
                        const Row& row) {
  const std::int64_t key_blocks = problem.key_blocks();
  const std::int64_t words = (key_blocks + 31) / 32;
  for (std::int64_t block = 0; block < words * 32; ++block) {
    const auto word = static_cast<std::uint32_t>(reference::read(got[Slot::tile_bits], row.index * words + block / 32));
    const bool kept = ((word >> (block % 32)) & 1U) != 0;
    if (block >= key_blocks) {
      if (kept) return fmt::format("tile_bits: row {}: bit {} of {} blocks is set", row.index, block, key_blocks);
      continue;
    }
    const auto tile = static_cast<std::size_t>(row.index * key_blocks + block);
    bool want = false;
    if (problem.skip.kind == SkipRule::Kind::mass) {
      const double code = reference::read(got[Slot::skip_memory], static_cast<std::int64_t>(tile));
      if (std::string failure = compare_memory(tile, code, oracle, allowed); !failure.empty()) return failure;
      want = (code - 239) / 8 > row.threshold;
    } else {
      const auto at = static_cast<std::size_t>(row.index * words + block / 32);
      want = ((static_cast<std::uint32_t>(oracle[Slot::tile_bits].values[at]) >> (block % 32)) & 1U) != 0;
      if (std::fabs(oracle.next_mass[tile] - row.threshold) <= allowed) continue;
    }
    if (kept != want) {
      return fmt::format("tile_bits: row {} block {}: {}, decided by {:.9g} against {:.9g}", row.index, block,
                         want ? "left out" : "kept", oracle.next_mass[tile], row.threshold);
    }
  }
  return "";
}

}  // namespace

std::string compare_skip(const Problem& problem, const Bindings& got, const reference::Result& oracle, double allowed) {
  const std::int64_t rows = problem.batch * problem.heads_q * problem.query_blocks();
  const std::int64_t words = (problem.key_blocks() + 31) / 32;
  for (std::int64_t row = 0; words > 0 && row < rows; ++row) {
    if (oracle[Slot::tile_bits].written[static_cast<std::size_t>(row * words)] == 0) continue;
    const std::int64_t head = row / problem.query_blocks() % problem.heads_q;
    const double threshold = reference::read(got[Slot::skip_threshold], head);
    if (std::string failure = compare_row(problem, got, oracle, allowed, {row, threshold}); !failure.empty())
      return failure;
  }
  return "";
}

}  // namespace tessera::cases
