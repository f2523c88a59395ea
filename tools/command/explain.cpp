// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda/jit/compile.h"
#include "options/commands.h"
#include "options/device_options.h"
#include "options/number_option.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cli {
namespace {

struct ExplainOptions {
  std::vector<std::string> problem;
  std::vector<std::string> wishes;
  TargetOptions target;
  PlaceOptions place;
  std::string architecture;
  int multiprocessors = 0;

  [[nodiscard]] Target planned_for() const {
    if (architecture.empty()) return place.target().value_or(target.target());
    Target chip = Target::cuda(cuda::compute_capability(architecture));
    chip.multiprocessors = multiprocessors;
    return chip;
  }
};

void explain(const ExplainOptions& options) {
  const Problem problem = Problem::parse(fmt::format("{}", fmt::join(options.problem, " ")));
  const Wishes wishes = Wishes::parse(fmt::format("{}", fmt::join(options.wishes, " ")));
  std::string text = make_plan(problem, options.planned_for(), wishes).explain();
  if (!text.empty() && text.back() != '\n') text += '\n';
  fmt::print("{}", text);
}

}  // namespace

void add_explain(CLI::App& app, int& exit_code) {
  CLI::App* verb =
      app.add_subcommand("explain", "Say how a problem would be computed, and why nothing else was chosen");
  auto options = std::make_shared<ExplainOptions>();
  verb->add_option("problem", options->problem, "The problem in its text form (docs/grammar.md), quoted or not")
      ->required();
  verb->add_option("-w,--wish", options->wishes,
                   "Wishes for the plan: implementation=, tile_q=, tile_kv=, splits=, stages=, warps=, loader=")
      ->allow_extra_args(false);
  add_target_options(*verb, options->target);
  add_place_options(*verb, options->place);
  CLI::Option* arch = verb->add_option("--arch", options->architecture,
                                       "A chip that need not be here, as sm_80, sm_89, sm_90a, sm_100f or sm_120f")
                          ->excludes("--device", "--emulate");
  add_number(*verb, "--multiprocessors", options->multiprocessors, 1, 100000,
             "With --arch: how many the chip has; without, nothing is split among them")
      ->needs(arch);
  verb->footer(R"(Examples:
  tessera explain "attention sq=4096 hq=32 hkv=8 d=128 dtype=bf16 causal"
  tessera explain attention sq=1 sk=65536 hq=32 hkv=8 d=128 --wish splits=8 --threads 2
  tessera explain "attention sq=1 sk=65536 hq=32 hkv=8 d=128 dtype=bf16" --arch sm_120 --multiprocessors 170)");
  verb->callback([options, &exit_code] {
    explain(*options);
    exit_code = kOk;
  });
}

}  // namespace tessera::cli
