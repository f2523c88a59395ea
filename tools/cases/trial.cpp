// SPDX-License-Identifier: Apache-2.0
#include "cases/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "cases/compare.h"
#include "cpu/reference_number.h"

namespace tessera::cases {
namespace {

constexpr std::size_t kGuardBytes = 256;  // behind the workspace
constexpr double kHopeless = 1000;        // times the tolerance: rounding does not explain that

/// The bits of every written element of the outputs, one after another.
std::vector<std::byte> output_bits(const Bindings& bindings, const reference::Result& expected) {
  std::vector<std::byte> bits;
  for (std::size_t slot = 0; slot < expected.outputs.size(); ++slot) {
    const reference::Output& output = expected.outputs[slot];
    if (output.values.empty()) continue;
    const Tensor& tensor = bindings.tensors[slot];
    const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
    reference::for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
      if (output.written[static_cast<std::size_t>(index)] == 0) return;
      const std::byte* at = tensor.bytes() + offset * element;
      bits.insert(bits.end(), at, at + element);
    });
  }
  return bits;
}

bool repeats_exactly(const Case& of) {
  if (of.problem.pass == Pass::backward) return of.problem.deterministic;
  return of.values.seed % 4 == 0;
}

}  // namespace

Trial::Trial(const Case& of)
    : case_(of),
      inputs_(of),
      oracle_(reference::compute(of.problem, inputs_.bindings(), reference::Arithmetic::oracle)),
      plain_{reference::compute(of.problem, inputs_.bindings(), reference::Arithmetic::plain)} {}

Outcome Trial::run(const std::string& isa) {
  Outcome outcome;
  Case rerun = case_;
  if (!isa.empty()) rerun.isa = isa;
  outcome.rerun = rerun.to_string();
  try {
    const Plan plan = make_plan(case_.problem, Target::cpu(case_.threads, rerun.isa), case_.wishes);
    outcome.failure = attempt(plan, outcome);
    while (!outcome.failure.empty() && outcome.worst_ratio < kHopeless && plain_.size() < kPlainRuns) {
      run_plain_again();
      outcome.failure = attempt(plan, outcome);
    }
    if (outcome.failure.empty() && repeats_exactly(case_)) {
      const std::vector<std::byte> first = output_bits(inputs_.bindings(), oracle_);
      outcome.failure = attempt(plan, outcome);
      if (outcome.failure.empty() && first != output_bits(inputs_.bindings(), oracle_)) {
        outcome.failure = "a second run gave other bits";
      }
    }
  } catch (const std::exception& error) {
    outcome.failure = error.what();
  }
  outcome.plain_runs = plain_.size();
  outcome.passed = outcome.failure.empty();
  return outcome;
}

/// Eight times as many as there are.
void Trial::run_plain_again() {
  inputs_.restore();  // gradients that accumulate begin with what the outputs hold
  const std::size_t enough = std::min<std::size_t>(kPlainRuns, plain_.size() * 8);
  while (plain_.size() < enough) {
    const auto order = static_cast<std::uint32_t>(plain_.size());
    plain_.push_back(reference::compute(case_.problem, inputs_.bindings(), reference::Arithmetic::plain, order));
  }
}

std::string Trial::attempt(const Plan& plan, Outcome& outcome) {
  inputs_.restore();
  PoisonedMemory workspace(plan.workspace_bytes() + kGuardBytes);
  Executor executor(plan, workspace.data(), plan.workspace_bytes());
  executor.run(inputs_.bindings());
  for (std::size_t i = plan.workspace_bytes(); i < workspace.size(); ++i) {
    if (workspace.data()[i] != std::byte{0xFF}) {
      return fmt::format("workspace: byte {} behind its {} was written", i - plan.workspace_bytes(),
                         plan.workspace_bytes());
    }
  }
  const Comparison comparison = compare(case_.problem, inputs_.bindings(), oracle_, plain_);
  outcome.worst_ratio = comparison.worst_ratio;
  outcome.mirrored = comparison.mirrored;
  if (!comparison.passed) return comparison.failure;
  return inputs_.find_damage(oracle_);
}

std::vector<Outcome> run_case_on(const Case& of, const std::vector<std::string>& isas) {
  std::vector<Outcome> outcomes;
  try {
    Trial trial(of);
    for (const std::string& isa : isas) outcomes.push_back(trial.run(isa));
  } catch (const std::exception& error) {
    Outcome& outcome = outcomes.emplace_back();
    outcome.failure = error.what();
    outcome.rerun = of.to_string();
  }
  return outcomes;
}

Outcome run_case(const Case& of) { return run_case_on(of, {""}).front(); }

}  // namespace tessera::cases
