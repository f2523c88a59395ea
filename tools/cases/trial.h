// SPDX-License-Identifier: Apache-2.0
// One case, run and judged.
#pragma once

#include <string>
#include <vector>

#include "cases/case.h"
#include "cases/inputs.h"
#include "cpu/reference.h"
#include "tessera/executor.h"

namespace tessera::cases {

struct Outcome {
  bool passed = false;
  std::string failure;         // why not: the comparison's words, damage, or the error that came
  double worst_ratio = 0;      // largest error / tolerance
  std::size_t plain_runs = 1;  // that the tolerance was taken from; compare.h
  bool mirrored = true;        // Comparison::mirrored
  std::string rerun;           // the case's line with the instruction set that it ran on
};

/// Inputs and references are made once, so that several instruction sets can be tried.
class Trial {
 public:
  explicit Trial(const Case& of);
  /// `isa`: "" for what the case says. Repeats the run where the result must not change (every fourth seed, and
  /// deterministic backwards) and compares the bits. Never throws for what the library does.
  Outcome run(const std::string& isa = "");

 private:
  void run_plain_again();
  std::string attempt(const Plan& plan, Outcome& outcome);

  Case case_;
  Inputs inputs_;
  reference::Result oracle_;
  std::vector<reference::Result> plain_;  // as many runs as were needed
};

/// One outcome for each instruction set ("": what the case says). Errors while the inputs are made are failures too.
std::vector<Outcome> run_case_on(const Case& of, const std::vector<std::string>& isas);
Outcome run_case(const Case& of);

}  // namespace tessera::cases
