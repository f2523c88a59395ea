// SPDX-License-Identifier: Apache-2.0
// `tessera random`: random problems against the oracle, by count or by time.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cases/random/features.h"
#include "cases/random/problem.h"
#include "cases/trial.h"
#include "options/commands.h"
#include "options/device_options.h"
#include "options/number_option.h"
#include "options/progress.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kLeastPairs = 100;  // how often every pair of features is to come up in 100 000 problems
constexpr std::uint64_t kLeastPairsPer = 100'000;
constexpr std::uint64_t kMostUnlike = 100'000;  // problems of which one has the text of `--match`, or runs on a GPU

struct RandomOptions {
  std::uint64_t count = 1000;
  double seconds = 0;
  std::uint64_t seed = 1;
  std::uint64_t values = 1;
  std::string match;
  int jobs = 1;
  std::string isa;
  std::string implementation;
  std::string histogram;
  cases::RandomScope scope;
  bool print_only = false;
  DeviceOptions device;
};

/// Several workers take indices one by one; what they find is kept in the order in which it comes.
class RandomRun {
 public:
  explicit RandomRun(const RandomOptions& options)
      : options_(options), progress_(options.seconds > 0 ? 0 : options.count) {
    if (options.device.device != "cpu" && options.print_only) {
      on_gpu_ = true;  // the lines need none
    } else {
      gpu_ = options.device.gpu();
      on_gpu_ = gpu_.has_value();
    }
    if (gpu_ && !options.implementation.empty()) gpu_->wishes += " implementation=" + options.implementation;
    if (options.isa.empty() || options.isa == "all") {
      isas_ = cases::tested_isas();
    } else {
      isas_ = {options.isa};
    }
  }

  void run() {
    check_match();
    std::vector<std::thread> workers;
    for (int worker = 1; worker < options_.jobs; ++worker) workers.emplace_back([this] { work(); });
    work();
    for (std::thread& worker : workers) worker.join();
    progress_.clear();
  }

  [[nodiscard]] bool report() const {
    const double seconds = elapsed();
    for (const auto& [reason, count] : reasons_) fmt::print("skipped {}: {}\n", count, reason);
    const std::uint64_t least = options_.scope.queries > 0 ? 0 : kLeastPairs * histogram_.total() / kLeastPairsPer;
    std::fputs(histogram_.summary(least).c_str(), stdout);
    fmt::print(
        "{}seed {}: {} problems in {:.1f} s ({:.2f} ms each on {} {}), {} failed; largest error {:.2f} of its "
        "tolerance\n",
        on_gpu_ ? fmt::format("{} skipped; ", skipped_.load()) : "", options_.seed, histogram_.total(), seconds,
        1e3 * seconds * options_.jobs / static_cast<double>(std::max<std::uint64_t>(1, histogram_.total())),
        options_.jobs, options_.jobs == 1 ? "worker" : "workers", failures_, worst_ratio_);
    fmt::print(
        "Rounding (docs/testing.md): {} passed by further runs of plain; all in fp32, {} of ours fail by plain's first "
        "run and {} of plain's first runs by ours\n",
        retried_, ours_fail_, plain_fails_);
    if (histogram_.total() == 0) fmt::print("FAIL none of {} problems ran\n", skipped_.load());
    const bool passed = failures_ == 0 && histogram_.total() > 0;
    if (options_.histogram.empty()) return passed;
    std::ofstream file(options_.histogram);
    file << histogram_.table();
    if (!file.flush())
      throw Error(ErrorCode::io, options_.histogram, "a file that cannot be written", "a writable path");
    return passed;
  }

  void print_lines() {
    check_match();
    for (std::uint64_t i = 0; i < options_.count; ++i) fmt::print("{}\n", next_problem().to_string());
  }

 private:
  [[nodiscard]] double elapsed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  void work() {
    while (true) {
      const std::uint64_t taken = taken_.fetch_add(1);
      // As many more as were skipped, unless a GPU has nothing for any.
      const std::uint64_t most = options_.count + std::min(skipped_.load(), std::max(options_.count, kMostUnlike));
      if (options_.seconds > 0 ? elapsed() >= options_.seconds : taken >= most) return;
      if (stopped_) return;
      cases::Case problem = next_problem();
      const cases::FeatureSet features = cases::features_of(problem);
      if (!on_gpu_ && !options_.implementation.empty()) {
        problem.wishes = {};
        problem.wishes.implementation = options_.implementation;
      }
      std::vector<cases::Outcome> outcomes;
      if (gpu_) {
        outcomes = {cases::run_case_on(problem, *gpu_)};
      } else if (options_.isa == "all") {
        outcomes = cases::run_case_on(problem, isas_);
      } else {
        outcomes = {cases::run_case(problem)};
      }
      const std::scoped_lock lock(mutex_);
      if (outcomes.front().skipped) {
        ++skipped_;
        ++reasons_[outcomes.front().failure];
        continue;
      }
      histogram_.add(features);
      for (const cases::Outcome& outcome : outcomes) record(problem.problem, outcome);
      if (options_.seconds > 0) {
        progress_.update_fraction(elapsed() / options_.seconds, fmt::format("{} problems", histogram_.total()));
      } else {
        progress_.update(histogram_.total(), fmt::format("{} failed", failures_));
      }
    }
  }

  [[nodiscard]] cases::Case draw(std::uint64_t index) const {
    const std::uint64_t plan = index / options_.values;
    const cases::RandomScope& scope = options_.scope;
    cases::Case problem = on_gpu_ ? cases::random_gpu_case(options_.seed, plan, scope)
                                  : cases::random_case(options_.seed, plan, isas_, scope);
    if (index % options_.values != 0) cases::redraw_values(problem, options_.seed, index);
    return problem;
  }

  [[nodiscard]] bool matches(const cases::Case& problem) const {
    return options_.match.empty() || problem.to_string().find(options_.match) != std::string::npos;
  }

  /// Throws where no problem has the text of --match.
  void check_match() const {
    for (std::uint64_t index = 0; index < kMostUnlike; ++index)
      if (matches(draw(index * options_.values))) return;
    throw Error(ErrorCode::invalid_argument, "--match",
                fmt::format("'{}', which none of {} problems has", options_.match, kMostUnlike),
                "a part of problem lines, say pass=backward");
  }

  cases::Case next_problem() {
    while (true) {
      cases::Case problem = draw(next_.fetch_add(1));
      if (matches(problem)) return problem;
    }
  }

  void record(const Problem& problem, const cases::Outcome& outcome) {
    worst_ratio_ = std::max(worst_ratio_, outcome.worst_ratio);
    const auto types = {problem.q_type, problem.k_type, problem.v_type, problem.o_type};
    if (std::ranges::all_of(types, [](DType type) { return type == DType::fp32; })) {
      ours_fail_ += outcome.plain_runs > 1 ? 1U : 0U;
      plain_fails_ += outcome.mirrored ? 0U : 1U;
    }
    if (outcome.passed) {
      if (outcome.plain_runs > 1) ++retried_;
      return;
    }
    ++failures_;
    if (outcome.fatal) stopped_ = true;
    progress_.clear();
    fmt::print("FAIL {}\n     tessera verify {}\n", outcome.failure, outcome.rerun);
    std::fflush(stdout);
  }

  const RandomOptions& options_;
  std::vector<std::string> isas_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<std::uint64_t> taken_{0};  // problems that workers have begun
  std::atomic<std::uint64_t> next_{0};   // the index that is drawn next
  std::mutex mutex_;
  Progress progress_;
  cases::FeatureHistogram histogram_;
  std::optional<cases::Gpu> gpu_;
  bool on_gpu_ = false;
  std::atomic<bool> stopped_{false};  // a kernel has broken the context
  std::atomic<std::uint64_t> skipped_{0};
  std::map<std::string, std::uint64_t> reasons_;
  std::uint64_t failures_ = 0;
  std::uint64_t retried_ = 0;  // passed, but not by the first run of plain
  // Problems all in fp32, where plain rounds nothing that we do not round: how often either one's error is above what
  // the rule makes of the other's.
  std::uint64_t ours_fail_ = 0;
  std::uint64_t plain_fails_ = 0;
  double worst_ratio_ = 0;
};

}  // namespace

void add_random(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RandomOptions>();
  CLI::App* verb = app.add_subcommand("random", "Check random problems against the oracle");
  add_number(*verb, "--count", options->count, 1, std::numeric_limits<std::int64_t>::max(),
             "How many problems; those that a GPU has nothing for do not count")
      ->default_str(fmt::to_string(options->count));
  add_number(*verb, "--seconds", options->seconds, 1e-3, 1e9, "For how long instead");
  add_number(*verb, "--seed", options->seed, 0, std::numeric_limits<std::uint64_t>::max(), "Which sequence of problems")
      ->default_str(fmt::to_string(options->seed));
  add_number(*verb, "--values", options->values, 1, 1'000'000,
             "Problems of each plan, which differ in inputs and lengths: on a GPU their kernels are compiled once")
      ->default_str("1");
  verb->add_option("--match", options->match, "Only problems whose line has this text, say pass=backward");
  add_number(*verb, "--jobs", options->jobs, 1, 1024, "Problems under way at once")->default_str("1");
  verb->add_option("--isa", options->isa, "Run all on this instruction set; `all`: each problem on every one");
  verb->add_option("--implementation", options->implementation, "Implementation to wish for, without other wishes");
  add_number(*verb, "--queries", options->scope.queries, 1, 256,
             "Forwards of at most so many queries a sequence alone, and batches that they share with prefills");
  verb->add_option("--histogram", options->histogram, "File for the counts of all pairs of features");
  add_device_options(*verb, options->device);
  verb->add_flag("--print-only", options->print_only, "Print the lines and run nothing");
  verb->callback([options, &exit_code] {
    RandomRun run(*options);
    if (options->print_only) return run.print_lines();
    run.run();
    if (!run.report()) exit_code = kCheckFailed;
  });
}

}  // namespace tessera::cli
