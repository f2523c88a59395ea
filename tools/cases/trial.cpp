// SPDX-License-Identifier: Apache-2.0
#include "cases/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "cases/compare.h"
#include "cpu/reference/number.h"
#include "cpu/simd/kernels.h"

namespace tessera::cases {
namespace {

constexpr std::size_t kWorkspaceGuardBytes = 256;  // behind the workspace

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

/// Tiles in a case are the CPU's; splits mean the same everywhere.
Wishes wishes_on(const Case& of, const Gpu& gpu) {
  Wishes wishes = Wishes::parse(gpu.wishes);
  if (!wishes.splits) wishes.splits = of.wishes.splits;
  // A TMA box has no rows backwards.
  if (of.problem.operation == Operation::attention && of.values.strides == Strides::negative) {
    if (of.problem.pass == Pass::backward) {
      if (wishes.implementation.empty()) wishes.implementation = "cuda.bwd_mma";
    } else if (wishes.loader.empty()) {
      wishes.loader = "cp_async";
    }
  }
  return wishes;
}

/// What follows `tessera verify` to run the case again.
std::string rerun_on(const Case& of, const Gpu& gpu) {
  std::string text = fmt::format("--device cuda:{}", gpu.target.index);
  if (gpu.target.emulated) text += fmt::format(" --emulate {}", gpu.target.sm);
  if (!gpu.wishes.empty()) text += fmt::format(" --wish \"{}\"", gpu.wishes);
  if (gpu.placement == Placement::apart) text += " --apart";
  return text + fmt::format(" \"{}\"", of.to_string());
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

/// Runs a plan once on the inputs as they are.
class Trial::Runner {
 public:
  virtual ~Runner() = default;
  /// "" or what the run did to memory that is not its own.
  virtual std::string run() = 0;
};

class Trial::CpuRunner : public Runner {
 public:
  CpuRunner(const Plan& plan, Inputs& inputs, std::uint64_t kind)
      : inputs_(inputs),
        bytes_(plan.workspace_bytes()),
        workspace_(bytes_ + kWorkspaceGuardBytes),
        kind_(kind),
        executor_(plan, workspace_.data(), bytes_) {}

  std::string run() override {
    poison({workspace_.data(), workspace_.size()}, DType::fp32, kind_);
    executor_.run(inputs_.bindings());
    for (std::size_t i = bytes_; i < workspace_.size(); ++i) {
      if (workspace_.data()[i] != static_cast<std::byte>(nan_bits(DType::fp32, kind_) >> (i % 4 * 8))) {
        return fmt::format("workspace: byte {} behind its {} was written", i - bytes_, bytes_);
      }
    }
    return "";
  }

 private:
  Inputs& inputs_;
  std::size_t bytes_;
  PoisonedMemory workspace_;
  std::uint64_t kind_;  // of the NaN in it
  Executor executor_;
};

class Trial::GpuRunner : public Runner {
 public:
  GpuRunner(const Plan& plan, Inputs& inputs, const Gpu& gpu)
      : copy_(inputs, plan.workspace_bytes(), gpu.target.index, gpu.placement),
        executor_(plan, copy_.workspace(), plan.workspace_bytes()),
        stream_(device_stream(gpu.target.index)) {}

  std::string run() override {
    copy_.upload();
    executor_.run(copy_.bindings(), stream_);
    wait_for(stream_);
    return copy_.download();
  }

 private:
  DeviceCopy copy_;
  Executor executor_;
  Stream stream_;
};

Outcome Trial::run(const std::string& isa) {
  Outcome outcome;
  Case rerun = case_;
  if (!isa.empty()) rerun.isa = isa;
  outcome.rerun = fmt::format("\"{}\"", rerun.to_string());
  try {
    const Plan plan = make_plan(case_.problem, Target::cpu(case_.threads, rerun.isa), case_.wishes);
    take_arithmetic_of(plan);
    CpuRunner runner(plan, inputs_, case_.values.seed);
    judge(runner, outcome);
  } catch (const std::exception& error) {
    outcome.failure = error.what();
  }
  outcome.plain_runs = plain_.size();
  outcome.passed = outcome.failure.empty();
  return outcome;
}

Outcome Trial::run(const Gpu& gpu) {
  Outcome outcome;
  outcome.rerun = rerun_on(case_, gpu);
  try {
    const Plan plan = make_plan(case_.problem, gpu.target, wishes_on(case_, gpu));
    take_arithmetic_of(plan);
    GpuRunner runner(plan, inputs_, gpu);
    judge(runner, outcome);
  } catch (const std::exception& error) {
    outcome.failure = error.what();
    outcome.fatal = !device_works(gpu.target.index);
  }
  outcome.plain_runs = plain_.size();
  outcome.passed = outcome.failure.empty();
  return outcome;
}

void Trial::judge(Runner& runner, Outcome& outcome) {
  outcome.failure = attempt(runner, outcome);
  while (!outcome.failure.empty() && rounding_may_explain(outcome.worst_ratio, plain_.size())) {
    run_plain_again();
    outcome.failure = attempt(runner, outcome);
  }
  if (!outcome.failure.empty() || !repeats_exactly(case_)) return;
  const std::vector<std::byte> first = output_bits(inputs_.bindings(), oracle_);
  outcome.failure = attempt(runner, outcome);
  if (outcome.failure.empty() && first != output_bits(inputs_.bindings(), oracle_)) {
    outcome.failure = "a second run gave other bits";
  }
}

/// Runs of plain that were made in another arithmetic than the plan's are no measure of it.
void Trial::take_arithmetic_of(const Plan& plan) {
  const reference::Arithmetic wanted = plain_arithmetic(plan);
  if (wanted == arithmetic_) return;
  inputs_.restore();
  arithmetic_ = wanted;
  plain_ = {reference::compute(case_.problem, inputs_.bindings(), arithmetic_)};
}

/// Eight times as many as there are.
void Trial::run_plain_again() {
  inputs_.restore();  // gradients that accumulate begin with what the outputs hold
  const std::size_t enough = std::min<std::size_t>(kPlainRuns, plain_.size() * 8);
  while (plain_.size() < enough) {
    const auto order = static_cast<std::uint32_t>(plain_.size());
    plain_.push_back(reference::compute(case_.problem, inputs_.bindings(), arithmetic_, order));
  }
}

std::string Trial::attempt(Runner& runner, Outcome& outcome) {
  inputs_.restore();
  if (std::string damage = runner.run(); !damage.empty()) return damage;
  const Comparison comparison = compare(case_.problem, inputs_.bindings(), oracle_, plain_);
  outcome.worst_ratio = comparison.worst_ratio;
  outcome.mirrored = comparison.mirrored;
  if (!comparison.passed) return comparison.failure;
  return inputs_.find_damage(oracle_);
}

std::vector<std::string> tested_isas() {
  std::vector<std::string> isas = cpu_isas();
  for (const std::string& emulated : cpu::emulated_isas()) isas.push_back(emulated);
  return isas;
}

std::vector<Outcome> run_case_on(const Case& of, const std::vector<std::string>& isas) {
  std::vector<Outcome> outcomes;
  try {
    Trial trial(of);
    for (const std::string& isa : isas) outcomes.push_back(trial.run(isa));
  } catch (const std::exception& error) {
    Outcome& outcome = outcomes.emplace_back();
    outcome.failure = error.what();
    outcome.rerun = fmt::format("\"{}\"", of.to_string());
  }
  return outcomes;
}

Outcome run_case(const Case& of) { return run_case_on(of, std::vector<std::string>{""}).front(); }

Outcome run_case_on(const Case& of, const Gpu& gpu) {
  Outcome outcome;
  try {
    const Support support = of.values.strides == Strides::odd
                                ? Support::no("rows an odd number of elements apart begin at no multiple of 16 bytes")
                                : supports(of.problem, gpu.target, wishes_on(of, gpu));
    if (support) return Trial(of).run(gpu);
    outcome.skipped = true;
    outcome.failure = support.reason;
  } catch (const std::exception& error) {
    outcome.failure = error.what();
  }
  outcome.rerun = rerun_on(of, gpu);
  return outcome;
}

}  // namespace tessera::cases
