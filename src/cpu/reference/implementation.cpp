// SPDX-License-Identifier: Apache-2.0
// The oracle as an implementation, which is chosen only if it is requested by name.
#include "base/element.h"
#include "cpu/implementations.h"
#include "cpu/reference/reference.h"

namespace tessera::cpu {
namespace {

Support supports_reference(const Problem& problem, const Target& /*target*/, const Wishes& wishes) {
  if (wishes.tile_q || wishes.tile_kv || wishes.splits.value_or(1) != 1) {
    return Support::no("has no tiles and no splits");
  }
  const auto is_paged = [](const KvSource& source) {
    return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
  };
  if (problem.operation == Operation::attention && problem.pass == Pass::backward &&
      (is_paged(problem.kv) || (problem.kv2 && is_paged(*problem.kv2)))) {
    return Support::no("a page may belong to several sequences, so paged KV has no backward");
  }
  const bool quantised = problem.operation == Operation::attention || problem.operation == Operation::quantize ||
                         (problem.operation == Operation::kv_append && problem.append.rotary == Rotary::none);
  for (const DType dtype : {problem.q_type, problem.k_type, problem.v_type, problem.o_type}) {
    if (quantised && detail::is_operand(dtype)) continue;
    if (!detail::is_result(dtype)) {
      return Support::no("dtype " + std::string(to_string(dtype)) + " is not " + detail::result_types());
    }
  }
  return Support::yes();
}

void plan_reference(detail::PlanState& state) {
  state.workspace_bytes = 0;
  state.choice =
      "textbook attention in double, one row after another on one thread\n"
      "allocates while it runs: for checking results, not for use";
}

void run_reference(const detail::PlanState& state, const Bindings& bindings, const Resources& /*resources*/) {
  reference::store(reference::compute(state.problem, bindings, reference::Arithmetic::oracle), bindings);
}

}  // namespace

const Implementation kReference = {
    {"cpu.reference", DeviceType::cpu, std::nullopt, supports_reference, plan_reference, std::nullopt, true},
    run_reference};

}  // namespace tessera::cpu
