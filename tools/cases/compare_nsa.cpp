// SPDX-License-Identifier: Apache-2.0
#include "cases/compare_nsa.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<std::int64_t> integers_of(const Tensor& tensor) {
  std::vector<std::int64_t> values;
  reference::for_each_element(tensor, [&](std::int64_t, std::int64_t offset) {
    values.push_back(static_cast<std::int64_t>(reference::read(tensor, offset)));
  });
  return values;
}

/// One list: `entries` has all its places, `scores` all blocks. Where scores have no errors, as those of scale=0, ties
/// go to the lower index.
std::string check_list(std::int64_t count, double want, const std::int64_t* entries, std::int64_t places,
                       const double* scores, std::int64_t blocks, double allowed) {
  const bool is_exact = allowed < std::numeric_limits<float>::min();
  if (static_cast<double>(count) != want) return fmt::format("count {}, oracle {}", count, want);
  std::vector<bool> taken(static_cast<std::size_t>(blocks));
  std::int64_t previous = -1;
  double least_taken = kInfinity;
  std::int64_t last_of_least = -1;
  for (std::int64_t i = 0; i < places; ++i) {
    const std::int64_t block = entries[i];
    if (i >= count ? block != -1 : block <= previous || block >= blocks) {
      return fmt::format("entry {} of {}: got {} after {}", i, count, block, previous);
    }
    if (i >= count) continue;
    previous = block;
    if (std::isnan(scores[block])) return fmt::format("block {} may not be taken", block);
    taken[static_cast<std::size_t>(block)] = true;
    if (scores[block] <= least_taken) last_of_least = block;
    least_taken = std::min(least_taken, scores[block]);
  }
  for (std::int64_t block = 0; block < blocks; ++block) {
    if (taken[static_cast<std::size_t>(block)] || std::isnan(scores[block])) continue;
    if (is_exact && scores[block] == least_taken && block < last_of_least) {
      return fmt::format("block {} is left out, {} of the same score is taken", block, last_of_least);
    }
    if (scores[block] <= least_taken || scores[block] - least_taken <= allowed) continue;
    return fmt::format("block {} of score {:.9g} is left out, one of {:.9g} is taken", block, scores[block],
                       least_taken);
  }
  return "";
}

/// The lists of one pair of slots; `scores` has those of all blocks of each list.
std::string check_lists(const Bindings& got, const reference::Result& oracle, Slot count_slot, Slot index_slot,
                        const std::vector<double>& scores, double allowed) {
  const std::vector<std::int64_t> counts = integers_of(got[count_slot]);
  const std::vector<std::int64_t> indices = integers_of(got[index_slot]);
  if (counts.empty()) return "";
  const std::size_t top = indices.size() / counts.size(), blocks = scores.size() / counts.size();
  for (std::size_t list = 0; list < counts.size(); ++list) {
    const std::string failure = check_list(counts[list], oracle[count_slot].values[list], indices.data() + list * top,
                                           static_cast<std::int64_t>(top), scores.data() + list * blocks,
                                           static_cast<std::int64_t>(blocks), allowed);
    if (!failure.empty()) return fmt::format("{}: list {}: {}", tessera::to_string(index_slot), list, failure);
  }
  return "";
}

}  // namespace

std::string compare_selected(const Bindings& got, const reference::Result& oracle, double allowed) {
  return check_lists(got, oracle, Slot::selected_counts, Slot::selected_indices, oracle.next_mass, allowed);
}

std::string compare_compressed(const Bindings& got, const reference::Result& oracle, double allowed) {
  return check_lists(got, oracle, Slot::compressed_counts, Slot::compressed_indices, oracle.compressed_scores, allowed);
}

}  // namespace tessera::cases
