// SPDX-License-Identifier: Apache-2.0
// One case, run and judged.
#pragma once

#include <string>
#include <vector>

#include "cases/device_copy.h"
#include "cases/inputs/inputs.h"
#include "cases/line/case.h"
#include "cpu/reference/reference.h"
#include "tessera/executor.h"

namespace tessera::cases {

/// Where on a GPU: a present chip's target or an emulated one's.
struct Gpu {
  Target target;
  Placement placement = Placement::together;
  std::string wishes;  // instead of the case's tiles; its splits stay
};

struct Outcome {
  bool passed = false;
  bool skipped = false;        // on a GPU: no implementation supports it; failure says why
  bool fatal = false;          // a kernel has broken the context: nothing can run any more
  std::string failure;         // why not: the comparison's words, damage, or the error that came
  double worst_ratio = 0;      // largest error / tolerance
  std::size_t plain_runs = 1;  // that the tolerance was taken from; compare.h
  bool mirrored = true;        // Comparison::mirrored
  std::string rerun;           // what `tessera verify` is to be given: the quoted line, and options of a GPU
};

/// Inputs and references are made once, so that several instruction sets can be tried.
class Trial {
 public:
  explicit Trial(const Case& of);
  /// `isa`: "" for what the case says. Repeats the run where the result must not change (every fourth seed, and
  /// deterministic backwards) and compares the bits. Never throws for what the library does.
  Outcome run(const std::string& isa = "");
  /// The same on a GPU.
  Outcome run(const Gpu& gpu);

 private:
  class Runner;
  class CpuRunner;
  class GpuRunner;
  void judge(Runner& runner, Outcome& outcome);
  void run_plain_again();
  std::string attempt(Runner& runner, Outcome& outcome);
  void take_arithmetic_of(const Plan& plan);

  Case case_;
  Inputs inputs_;
  reference::Result oracle_;
  reference::Arithmetic arithmetic_ = reference::Arithmetic::plain;
  std::vector<reference::Result> plain_;  // as many runs as were needed, in this arithmetic
};

/// One outcome for each instruction set ("": what the case says). Errors while the inputs are made are failures too.
std::vector<Outcome> run_case_on(const Case& of, const std::vector<std::string>& isas);
/// cpu_isas() and the emulated ones.
std::vector<std::string> tested_isas();
Outcome run_case(const Case& of);
/// A case that no implementation supports there is skipped, before its inputs are made.
Outcome run_case_on(const Case& of, const Gpu& gpu);

}  // namespace tessera::cases
