// SPDX-License-Identifier: Apache-2.0
// The order of the checks: each slot by itself, the callables, overlaps, then what is inside the metadata.
#include "bindings/validate.h"

#include "base/checked.h"
#include "bindings/slot_rules.h"
#include "bindings/validate_parts.h"
#include "problem/operation.h"
#include "tessera/callable.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

[[noreturn]] void refuse(std::string_view argument, std::string got, std::string want) {
  throw Error(ErrorCode::invalid_argument, std::string(argument), std::move(got), std::move(want));
}

/// Checks a slot that has a tensor; returns the span of the tensor.
Span check_slot(Slot slot, const SlotRule& rule, const Tensor& tensor, Device device) {
  if (rule.presence == Presence::unused) {
    refuse(to_string(slot), tensor.describe(),
           "nothing bound: this problem has no use for it, one with " + std::string(slot_use(slot)) + " has");
  }
  const Span span = check_tensor(to_string(slot), rule, tensor, device);
  if (device.type == DeviceType::cuda) check_rows(slot, tensor);
  return span;
}

/// The slots with a tensor, in order.
struct BoundSlots {
  std::array<BoundSlot, static_cast<std::size_t>(Slot::count_)> slots;  // the first `count`; not zeroed, to save time
  std::size_t count = 0;
};

/// Checks each slot by itself.
BoundSlots check_slots(const SlotRules& rules, const Bindings& bindings, Device device) {
  BoundSlots bound;
  for (std::size_t i = 0; i < rules.rules.size(); ++i) {
    const auto slot = static_cast<Slot>(i);
    const SlotRule& rule = rules.rules[i];
    const Tensor& tensor = bindings.tensors[i];
    if (tensor) {
      bound.slots[bound.count++] = {slot, rule.written, &tensor, check_slot(slot, rule, tensor, device)};
    } else if (rule.presence == Presence::required) {
      refuse(to_string(slot), "unbound", describe(rule));
    }
  }
  return bound;
}

/// Why there is nothing to call on the CPU, for errors.
std::string without_function(const std::string& name, bool registered) {
  if (registered) return "no callable bound, and the text registered as \"" + name + "\" has no host function";
  return "no callable bound, and \"" + name + "\" is neither a built-in nor registered";
}

/// Checks both callables: if the problem names one, it is bound, registered or built in, else it is not bound.
void check_callables(const Problem& p, const Bindings& b) {
  if (p.score.empty()) {
    if (b.score.value != nullptr || b.score.derivative != nullptr) {
      refuse("score", "a bound callable", "none: the problem names no score, one with score=NAME does");
    }
  } else {
    const auto score = b.score.value != nullptr ? std::optional(b.score) : builtin_score(p.score);
    if (!score)
      refuse("score", without_function(p.score, registered_score(p.score) != nullptr), "a bound ScoreFunction");
    if (b.score.value == nullptr && b.score.derivative != nullptr) refuse("score", "a derivative alone", "a value too");
    if (p.pass == Pass::backward && score->derivative == nullptr) {
      refuse("score.derivative", "nullptr", "d value / d score, a backward needs it");
    }
  }
  if (b.mask.visible == nullptr && b.mask.classify != nullptr) refuse("mask", "a classifier alone", "visible too");
  if (p.mask.empty()) {
    if (b.mask.visible != nullptr) {
      refuse("mask", "a bound callable", "none: the problem names no mask, one with mask=NAME does");
    }
  } else if (b.mask.visible == nullptr && !builtin_mask(p.mask)) {
    refuse("mask", without_function(p.mask, registered_mask(p.mask) != nullptr), "a bound MaskFunction");
  }
}

void check_scalar(std::string_view name, std::int64_t value) {
  if (value > kMaxPosition || value < -kMaxPosition) {
    throw Error(ErrorCode::out_of_range, std::string(name), std::to_string(value), "at most 2^60 either way");
  }
}

/// A kernel cannot call a host function. That the problem's names stand for something was checked by the plan.
void check_no_host_functions(const Bindings& b) {
  const char* want = "none on cuda: a built-in, or C++ text (register_score, register_mask)";
  if (b.score.value != nullptr || b.score.derivative != nullptr) refuse("score", "a host function", want);
  if (b.mask.visible != nullptr || b.mask.classify != nullptr) refuse("mask", "a host function", want);
}

}  // namespace

void validate(const Problem& problem, const Bindings& bindings, Device device) {
  validate(problem, slot_rules(problem), bindings, device);
}

void validate(const Problem& problem, const SlotRules& rules, const Bindings& bindings, Device device) {
  const BoundSlots bound = check_slots(rules, bindings, device);
  const OperationRules& operation = rules_of(problem.operation);
  if (operation.check_bound != nullptr) operation.check_bound(problem, bindings);
  if (device.type == DeviceType::cpu) {
    check_callables(problem, bindings);
  } else {
    check_no_host_functions(bindings);
  }
  check_scalar("batch_offset", bindings.batch_offset);
  check_scalar("head_offset", bindings.head_offset);
  check_overlaps(std::span(bound.slots).first(bound.count));
  if (device.type != DeviceType::cpu) return;  // the contents of tensors on a device are not read here
  operation.check_values(problem, bindings);
}

}  // namespace tessera::detail
