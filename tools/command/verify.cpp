// SPDX-License-Identifier: Apache-2.0
// `tessera verify`: case files or case lines against the oracle.
#include <fmt/format.h>
#include <regex.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "cases/line/case.h"
#include "cases/random/spread.h"
#include "cases/trial.h"
#include "options/commands.h"
#include "options/device_options.h"
#include "options/progress.h"

namespace tessera::cli {
namespace {

struct VerifyOptions {
  std::vector<std::string> sources;  // files, folders or case lines
  std::string isa;
  std::string implementation;
  DeviceOptions device;
  std::string filter;
  bool spread = false;
  std::string share;
};

struct Batch {
  std::string name;
  std::vector<cases::Case> cases;
};

/// A line holds a blank or a '='; nothing else does that is a path people use for case files.
bool is_line(const std::string& text) {
  std::error_code too_long_for_a_path;
  return text.find_first_of(" =") != std::string::npos && !std::filesystem::exists(text, too_long_for_a_path);
}

std::vector<Batch> collect(const std::vector<std::string>& sources) {
  std::vector<Batch> batches;
  for (const std::string& source : sources) {
    if (is_line(source)) {
      batches.push_back({"command line", {cases::Case::parse(source)}});
      continue;
    }
    std::vector<std::filesystem::path> files;
    if (std::filesystem::is_directory(source)) {
      for (const auto& entry : std::filesystem::directory_iterator(source)) {
        if (entry.path().extension() == ".txt") files.push_back(entry.path());
      }
      std::sort(files.begin(), files.end());
      if (files.empty()) throw Error(ErrorCode::io, source, "a folder without case files", "a folder with .txt files");
    } else {
      files.emplace_back(source);
    }
    for (const auto& file : files) batches.push_back({file.stem().string(), cases::read_case_file(file.string())});
  }
  return batches;
}

/// A POSIX extended regular expression. std::regex would do, but its templates set off false warnings under sanitizers.
class Pattern {
 public:
  explicit Pattern(const std::string& text) {
    const int error = regcomp(&compiled_, text.c_str(), REG_EXTENDED | REG_NOSUB);
    if (error == 0) return;
    std::array<char, 128> why{};
    regerror(error, &compiled_, why.data(), why.size());
    throw Error(ErrorCode::parse, "--filter", text, std::string("a regular expression: ") + why.data());
  }
  ~Pattern() { regfree(&compiled_); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;
  [[nodiscard]] bool matches(const std::string& line) const {
    return regexec(&compiled_, line.c_str(), 0, nullptr, 0) == 0;
  }

 private:
  regex_t compiled_{};
};

void keep_matching(std::vector<Batch>& batches, const std::string& filter) {
  const Pattern pattern(filter);
  for (Batch& batch : batches) {
    std::erase_if(batch.cases, [&](const cases::Case& one) { return !pattern.matches(one.to_string()); });
  }
}

/// Of each file a spread of its cases.
void keep_spread(std::vector<Batch>& batches) {
  for (Batch& batch : batches) {
    std::vector<cases::Case> taken;
    for (const std::size_t i : cases::spread_of(batch.cases)) taken.push_back(std::move(batch.cases[i]));
    batch.cases = std::move(taken);
  }
}

/// Of "K/N" the K-th of every N cases of each file, from 1 on.
void keep_share(std::vector<Batch>& batches, const std::string& share) {
  std::size_t which = 0, of = 0;
  const char* end = share.data() + share.size();
  const auto [slash, first] = std::from_chars(share.data(), end, which);
  if (first == std::errc() && slash != end && *slash == '/') {
    const auto [rest, second] = std::from_chars(slash + 1, end, of);
    if (second != std::errc() || rest != end) of = 0;
  }
  if (which == 0 || which > of) throw Error(ErrorCode::parse, "--share", share, "K/N with 1 <= K <= N, as in 1/2");
  for (Batch& batch : batches) {
    std::vector<cases::Case> taken;
    for (std::size_t i = which - 1; i < batch.cases.size(); i += of) taken.push_back(std::move(batch.cases[i]));
    batch.cases = std::move(taken);
  }
}

/// Instruction sets of case `number` of its file. By turns it is one after another, but for cases that name one.
std::vector<std::string> chosen_isas(const std::string& isa, const cases::Case& one, std::size_t number) {
  if (isa != "all" && isa != "turns") return {isa};  // "": what each case says
  const std::vector<std::string> isas = cases::tested_isas();
  if (isa == "all") return isas;
  return {one.isa.empty() ? isas[number % isas.size()] : one.isa};
}

struct Tally {
  std::size_t run = 0;
  std::size_t failed = 0;
  std::size_t retried = 0;  // passed, but not by the first run of plain
  std::size_t skipped = 0;  // on a GPU: no implementation there
  double worst_ratio = 0;

  void add(const cases::Outcome& outcome) {
    if (outcome.skipped) {
      ++skipped;
      return;
    }
    ++run;
    worst_ratio = std::max(worst_ratio, outcome.worst_ratio);
    if (outcome.passed && outcome.plain_runs > 1) ++retried;
    if (!outcome.passed) ++failed;
  }
  void add(const Tally& other) {
    run += other.run;
    failed += other.failed;
    retried += other.retried;
    skipped += other.skipped;
    worst_ratio = std::max(worst_ratio, other.worst_ratio);
  }
};

/// Reasons why cases were skipped, and how often each.
using Reasons = std::map<std::string, std::size_t>;

void print_reasons(const Reasons& reasons) {
  for (const auto& [reason, count] : reasons) fmt::print("skipped {}: {}\n", count, reason);
}

/// Case `number` of its file wherever it is to run.
std::vector<cases::Outcome> run_one(cases::Case one, std::size_t number, const VerifyOptions& options,
                                    const std::optional<cases::Gpu>& gpu) {
  if (gpu) return {cases::run_case_on(one, *gpu)};
  if (!options.implementation.empty()) {
    one.wishes = {};
    one.wishes.implementation = options.implementation;
  }
  return cases::run_case_on(one, chosen_isas(options.isa, one, number));
}

void verify(const VerifyOptions& options, int& exit_code) {
  std::optional<cases::Gpu> gpu = options.device.gpu();
  if (gpu && !options.implementation.empty()) gpu->wishes += " implementation=" + options.implementation;
  std::vector<Batch> batches = collect(options.sources);
  keep_matching(batches, options.filter);
  if (options.spread) keep_spread(batches);
  if (!options.share.empty()) keep_share(batches, options.share);
  std::size_t total = 0;
  for (const Batch& batch : batches) total += batch.cases.size();
  Progress progress(total);
  const auto start = std::chrono::steady_clock::now();
  Tally all;
  Reasons reasons;
  std::size_t done = 0;
  for (const Batch& batch : batches) {
    Tally tally;
    for (std::size_t i = 0; i < batch.cases.size(); ++i) {
      progress.update(done++, batch.name);
      for (const cases::Outcome& outcome : run_one(batch.cases[i], i, options, gpu)) {
        tally.add(outcome);
        if (outcome.skipped) ++reasons[outcome.failure];
        if (outcome.passed || outcome.skipped) continue;
        progress.clear();
        fmt::print("FAIL {}\n     tessera verify {}\n", outcome.failure, outcome.rerun);
        if (outcome.fatal) throw Error(ErrorCode::internal, "device", outcome.failure, "a GPU that still works");
      }
    }
    progress.clear();
    fmt::print("{:<20} {:>5} run {:>5} failed, largest error {:.2f} of its tolerance\n", batch.name, tally.run,
               tally.failed, tally.worst_ratio);
    std::fflush(stdout);
    all.add(tally);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_reasons(reasons);
  fmt::print("{} run, {} failed, {} passed by further runs of plain, {}{:.1f} s\n", all.run, all.failed, all.retried,
             gpu ? fmt::format("{} skipped, ", all.skipped) : "", seconds);
  if (all.failed > 0) exit_code = kCheckFailed;
}

}  // namespace

void add_verify(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* verb = app.add_subcommand("verify", "Check case files or case lines against the oracle");
  verb->add_option("sources", options->sources, "Case files, folders of them (*.txt), or case lines in quotes")
      ->required();
  verb->add_option(
      "--isa", options->isa,
      "Run all on this instruction set; `all`: on every one; `turns`: each on one, the next case on the next");
  verb->add_option("--implementation", options->implementation, "Implementation to wish for, without other wishes");
  add_device_options(*verb, options->device);
  verb->add_option("--filter", options->filter, "Only cases whose line matches this regular expression");
  verb->add_flag("--spread", options->spread, "Of each file only cases that have every feature and value that it has");
  verb->add_option("--share", options->share, "K/N: the K-th of every N cases of each file that are left by then");
  verb->callback([options, &exit_code] { verify(*options, exit_code); });
}

}  // namespace tessera::cli
