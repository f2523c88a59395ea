// SPDX-License-Identifier: Apache-2.0
#include "cases/inputs/slot_shapes.h"

#include <cstddef>
#include <string>

#include "bindings/slot_rules.h"

namespace tessera::cli {
namespace {

bool is_metadata(DType dtype) {
  return dtype == DType::int32 || dtype == DType::uint32 || dtype == DType::int64 || dtype == DType::uint64 ||
         dtype == DType::uint8;
}

/// Tensors that the problem must have and knows the sizes of.
template <class Wanted>
std::vector<SlotShape> slots_of(const Problem& problem, Wanted wanted) {
  std::vector<SlotShape> slots;
  const detail::SlotRules rules = detail::slot_rules(problem);
  for (std::size_t i = 0; i < rules.rules.size(); ++i) {
    const detail::SlotRule& rule = rules.rules[i];
    if (rule.presence != detail::Presence::required || rule.at_least != 0 || !wanted(rule)) continue;
    const std::int64_t* begin = rule.shape.data() + (rule.leading_batch ? 1 : 0);
    slots.push_back({static_cast<Slot>(i), rule.dtype, {begin, rule.shape.data() + rule.rank}, rule.written});
  }
  return slots;
}

}  // namespace

std::vector<SlotShape> value_inputs(const Problem& problem) {
  return slots_of(problem, [](const detail::SlotRule& rule) { return rule.read && !is_metadata(rule.dtype); });
}

std::vector<SlotShape> outputs(const Problem& problem) {
  return slots_of(problem, [](const detail::SlotRule& rule) { return rule.written && !rule.read; });
}

void allocate_outputs(const Problem& problem, Arrays& arrays) {
  for (const SlotShape& slot : outputs(problem)) {
    if (!arrays[slot.slot]) arrays[slot.slot] = files::Array(slot.dtype, slot.shape, to_string(slot.slot));
  }
}

Bindings bindings_of(const Arrays& arrays) {
  Bindings bindings;
  for (const auto& [slot, array] : arrays) bindings[slot] = array.tensor();
  return bindings;
}

}  // namespace tessera::cli
