// SPDX-License-Identifier: Apache-2.0
#include "cpu/scores/lane_program.h"

#include <algorithm>
#include <array>
#include <bit>

namespace tessera::cpu {
namespace {

using detail::Expression;
using detail::ExpressionStep;

LaneStage stage_of(const ExpressionStep& step, bool inner_is_query) {
  const std::uint8_t inner = inner_is_query ? detail::kChangesWithQuery : detail::kChangesWithKey;
  if (step.axes == 0) return LaneStage::fixed;
  if (step.axes == inner) return LaneStage::inner;
  return step.axes == (detail::kChangesWithQuery | detail::kChangesWithKey) ? LaneStage::element : LaneStage::outer;
}

/// The free slots, one bit each.
class Slots {
 public:
  /// Returns −1 if none is left.
  int take() {
    if (free_ == 0) return -1;
    const int slot = std::countr_zero(free_);
    free_ &= free_ - 1;
    return slot;
  }
  void give_back(int slot) { free_ |= std::uint64_t{1} << slot; }

 private:
  static_assert(kExpressionSlots == 64);
  std::uint64_t free_ = ~std::uint64_t{0};
};

class Maker {
 public:
  Maker(const Expression& expression, bool inner_is_query, LaneProgram& program) : e_(expression), program_(program) {
    const int count = static_cast<int>(e_.steps.size());
    last_use_.fill(-1);
    for (int i = 0; i < count; ++i) {
      const auto& step = e_.steps[static_cast<std::size_t>(i)];
      stages_[static_cast<std::size_t>(i)] = stage_of(step, inner_is_query);
      for (int k = 0; k < step.operands; ++k) last_use_[step.from[k]] = i;
    }
    for (const int result : {e_.value, e_.derivative}) {
      if (result >= 0) last_use_[static_cast<std::size_t>(result)] = count;  // never free
    }
  }

  void make() {
    program_.has_derivative = e_.derivative >= 0;
    program_.usable = true;
    int written = 0;
    for (const LaneStage stage : {LaneStage::fixed, LaneStage::outer, LaneStage::inner, LaneStage::element}) {
      for (std::size_t i = 0; i < e_.steps.size() && program_.usable; ++i) {
        if (stages_[i] == stage) program_.usable = add(i, program_.steps[written++]);
      }
      program_.end[static_cast<int>(stage)] = written;
    }
    if (!program_.usable) return;
    program_.value = operand(static_cast<std::size_t>(e_.value));
    if (program_.has_derivative) program_.derivative = operand(static_cast<std::size_t>(e_.derivative));
  }

 private:
  [[nodiscard]] LaneOperand operand(std::size_t step) const { return {slot_[step], stages_[step]}; }

  bool add(std::size_t index, LaneStep& out) {
    const ExpressionStep& step = e_.steps[index];
    const int slot = slots_.take();
    if (slot < 0) return false;
    slot_[index] = static_cast<std::uint8_t>(slot);
    out = {step.op,
           step.type,
           step.operand,
           step.operands,
           step.in_value,
           step.tensor,
           slot_[index],
           stages_[index],
           {},
           static_cast<float>(step.real),
           step.integer};
    for (int k = 0; k < step.operands; ++k) out.from[k] = operand(step.from[k]);
    if (stages_[index] != LaneStage::element) return true;
    // Frees only values that each line computes anew: the others are needed for the next line. The result already has
    // its slot, so that it differs from those of the operands.
    for (int k = 0; k < step.operands; ++k) {
      const std::uint16_t from = step.from[k];
      if (stages_[from] != LaneStage::element || last_use_[from] != static_cast<int>(index)) continue;
      last_use_[from] = -1;  // an operand may occur twice
      slots_.give_back(slot_[from]);
    }
    return true;
  }

  const Expression& e_;
  LaneProgram& program_;
  Slots slots_;
  std::array<int, Expression::kMostSteps> last_use_{};
  std::array<std::uint8_t, Expression::kMostSteps> slot_{};
  std::array<LaneStage, Expression::kMostSteps> stages_{};
};

}  // namespace

void make_lane_program(const Expression& expression, bool inner_is_query, LaneProgram& program) {
  Maker(expression, inner_is_query, program).make();
}

std::string element_calls(const detail::RegisteredCallables& callables) {
  std::string lines;
  const auto add = [&](const char* kind, const Expression* expression) {
    if (expression == nullptr) return;
    LaneProgram by_query{};
    LaneProgram by_key{};
    make_lane_program(*expression, true, by_query);
    make_lane_program(*expression, false, by_key);
    if (by_query.usable && by_key.usable) return;
    lines += std::string(kind) + ": element by element, not by vectors: of its " +
             std::to_string(expression->steps.size()) + " steps more than " + std::to_string(kExpressionSlots) +
             " values are needed at once\n";
  };
  add("score", callables.score_program);
  add("mask", callables.mask_program);
  return lines;
}

}  // namespace tessera::cpu
