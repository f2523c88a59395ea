// SPDX-License-Identifier: Apache-2.0
// `tessera compile`: kernels for given architectures, without a GPU; into a cache, a pack, or only to look at them.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "cases/line/case.h"
#include "command/spread.h"
#include "cuda/jit/cache.h"
#include "cuda/jit/compile.h"
#include "cuda/jit/disk_cache.h"
#include "cuda/jit/pack.h"
#include "options/commands.h"
#include "options/number_option.h"
#include "options/text_options.h"
#include "plan/implementations.h"
#include "tessera/cuda.h"

namespace tessera::cli {
namespace {

struct CompileOptions {
  std::vector<std::string> problems;
  std::vector<std::string> lists;
  std::vector<std::string> sources;
  std::vector<std::string> architectures;
  std::string headers;
  std::string nvrtc;
  std::string cache;
  std::string pack;
  std::string cubin;
  TextOptions texts;
  int jobs = 1;
  bool spread = false;
  bool verbose = false;
};

struct Job {
  cuda::KernelSource source;
  std::string architecture;
  // Results; `failure` if there is none.
  std::shared_ptr<const cuda::Compiled> compiled;
  std::string from;
  std::string failure;
  std::atomic<bool> done{false};
};

/// One line of a list: a problem with wishes, and optionally arch=sm_80,sm_89 to say where alone it is wanted.
struct KernelLine {
  std::string text;
  std::vector<std::string> architectures;
};

KernelLine parse_line(std::string_view text) {
  KernelLine line;
  std::istringstream tokens{std::string(text)};
  for (std::string token; tokens >> token;) {
    if (token.starts_with("arch=")) {
      std::istringstream names(token.substr(5));
      for (std::string name; std::getline(names, name, ',');) line.architectures.push_back(name);
    } else {
      line.text += (line.text.empty() ? "" : " ") + token;
    }
  }
  return line;
}

void append_list(std::vector<KernelLine>& lines, const std::string& path) {
  std::istringstream text(read_text(path));
  for (std::string line; std::getline(text, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos || line.starts_with('#')) continue;
    lines.push_back(parse_line(line));
  }
}

std::vector<KernelLine> read_lines(const CompileOptions& options) {
  std::vector<KernelLine> lines;
  for (const std::string& problem : options.problems) {
    std::error_code too_long_for_a_path;
    if (!std::filesystem::exists(problem, too_long_for_a_path)) {
      lines.push_back(parse_line(problem));
      continue;
    }
    append_list(lines, problem);
  }
  for (const std::string& list : options.lists) append_list(lines, list);
  return lines;
}

class Compilation {
 public:
  explicit Compilation(const CompileOptions& options) : options_(options) {
    if (!options.headers.empty()) files_.emplace(options.headers);
    for (const std::string& path : options.sources) {
      const cuda::KernelSource source{path, read_text(path)};
      for (const std::string& architecture : options.architectures) add(source, architecture);
    }
    for (const KernelLine& line : read_lines(options)) add_line(line);
    if (options.spread) keep_spread();
  }

  /// Whether every kernel compiled into registers alone, without a loss that the assembler tells of.
  bool run() {
    fmt::print("{:<48} {:<8} {:>4} {:>6} {:>5} {:>6} {:>7} {:>7} {:>7}  {}\n", "kernel", "arch", "regs", "spills",
               "local", "static", "dynamic", "cubin", "seconds", "from");
    std::vector<std::thread> workers;
    for (int i = 0; i < options_.jobs; ++i) workers.emplace_back([this] { work(); });
    bool good = true;
    double seconds = 0;
    for (const auto& job : jobs_) {
      job->done.wait(false);
      good = print(*job) && good;
      if (job->compiled) seconds += job->compiled->seconds;
    }
    for (std::thread& worker : workers) worker.join();
    const auto failed = std::count_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return !is_good(*job); });
    if (options_.spread) fmt::print("a spread of {} kernels:\n", seen_.size());
    fmt::print("{} kernels, {} failed, {:.1f} s of compilation\n", jobs_.size(), failed, seconds);
    return good && failed == 0;
  }

  [[nodiscard]] bool is_complete() const {
    return std::all_of(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->compiled != nullptr; });
  }

  void write_pack(const std::string& path) const {
    cuda::PackWriter writer;
    for (const auto& job : jobs_) {
      if (job->compiled) {
        writer.add(cuda::kernel_key(job->source, job->architecture), job->source.name, job->architecture,
                   *job->compiled);
      }
    }
    const std::vector<char> bytes = writer.bytes();
    cuda::replace_file(path, bytes);
    fmt::print("{}: {} kernels, {} bytes\n", path, writer.size(), bytes.size());
  }

 private:
  void add(const cuda::KernelSource& source, const std::string& architecture) {
    if (!seen_.insert(cuda::kernel_key(source, architecture)).second) return;
    auto job = std::make_unique<Job>();
    job->source = source;
    job->architecture = architecture;
    jobs_.push_back(std::move(job));
  }

  void keep_spread() {
    std::vector<ListedKernel> kernels;
    for (const auto& job : jobs_) kernels.push_back({job->source.name, job->architecture});
    std::vector<std::unique_ptr<Job>> taken;
    for (const std::size_t i : spread_of(kernels)) taken.push_back(std::move(jobs_[i]));
    jobs_ = std::move(taken);
  }

  void add_line(const KernelLine& line) {
    const cases::Case one = cases::Case::parse(line.text);
    for (const std::string& architecture : options_.architectures) {
      const auto& only = line.architectures;
      if (!only.empty() && std::find(only.begin(), only.end(), architecture) == only.end()) continue;
      const Plan plan = make_plan(one.problem, Target::cuda(cuda::compute_capability(architecture)), one.wishes);
      for (const cuda::KernelSource& source : plan.state().kernels) add(source, architecture);
    }
  }

  void work() {
    for (std::size_t i = next_++; i < jobs_.size(); i = next_++) {
      Job& job = *jobs_[i];
      try {
        if (options_.cache.empty()) {
          job.compiled = std::make_shared<const cuda::Compiled>(
              cuda::compile(job.source, job.architecture,
                            files_ ? std::span(std::as_const(files_->headers)) : cuda::embedded_headers()));
          job.from = cuda::to_string(cuda::Origin::compiler);
        } else {
          const cuda::Found found = cuda::find_or_compile(job.source, job.architecture);
          job.compiled = found.compiled;
          job.from = cuda::to_string(found.origin);
        }
      } catch (const std::exception& error) {
        job.failure = error.what();
      }
      job.done = true;
      job.done.notify_all();
    }
  }

  static bool is_good(const Job& job) {
    const cuda::Compiled* c = job.compiled.get();
    return c != nullptr && c->spill_bytes == 0 && c->local_bytes == 0 && !cuda::loses_speed(c->log) && fits(job);
  }

  static bool fits(const Job& job) {
    const std::int64_t room = Target::cuda(cuda::compute_capability(job.architecture)).shared_memory;
    return static_cast<std::int64_t>(job.source.shared_bytes) + job.compiled->shared_bytes <= room;
  }

  bool print(const Job& job) const {
    if (!job.compiled) {
      fmt::print("{:<48} {:<8} FAILED\n{}\n", job.source.name, job.architecture, job.failure);
      return false;
    }
    const cuda::Compiled& c = *job.compiled;
    fmt::print("{:<48} {:<8} {:>4} {:>6} {:>5} {:>6} {:>7} {:>7} {:>7.2f}  {}{}\n", job.source.name, job.architecture,
               c.registers, c.spill_bytes, c.local_bytes, c.shared_bytes, job.source.shared_bytes, c.cubin.size(),
               c.seconds, job.from, fits(job) ? "" : "  TOO MUCH SHARED MEMORY");
    for (const std::string& line : cuda::warnings(c.log)) fmt::print("    {}\n", line);
    if (options_.verbose) fmt::print("{}\n", c.log);
    std::fflush(stdout);
    return is_good(job);
  }

  const CompileOptions& options_;
  std::optional<cuda::HeaderFiles> files_;
  std::set<cuda::Digest> seen_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::atomic<std::size_t> next_{0};

 public:
  /// The kernel of most machine code; null if none compiled.
  [[nodiscard]] const cuda::Compiled* largest() const {
    const cuda::Compiled* found = nullptr;
    for (const auto& job : jobs_) {
      const cuda::Compiled* compiled = job->compiled.get();
      if (compiled != nullptr && (found == nullptr || compiled->cubin.size() > found->cubin.size())) found = compiled;
    }
    return found;
  }
};

void compile(const CompileOptions& options, int& exit_code) {
  for (const std::string& architecture : options.architectures) cuda::compute_capability(architecture);
  if (!options.headers.empty() && (!options.cache.empty() || !options.pack.empty())) {
    throw Error(ErrorCode::invalid_argument, "--headers", options.headers,
                "none with --cache or --pack: the library looks kernels up under its own headers");
  }
  cuda::set_nvrtc(options.nvrtc);
  if (!options.cache.empty()) cuda::set_cache_folder(options.cache);
  if (options.cache.empty()) cuda::compiler();      // without one, say so once
  if (!options.pack.empty()) cuda::ignore_packs();  // a new one is no copy of the one in use
  options.texts.register_all();
  Compilation compilation(options);
  if (!compilation.run()) exit_code = kCheckFailed;
  if (!options.pack.empty() && compilation.is_complete()) compilation.write_pack(options.pack);
  if (const cuda::Compiled* largest = compilation.largest(); largest != nullptr && !options.cubin.empty()) {
    cuda::replace_file(options.cubin, largest->cubin);
  }
}

}  // namespace

void add_compile(CLI::App& app, int& exit_code) {
  CLI::App* verb = app.add_subcommand("compile", "Compile GPU kernels for given architectures; needs no GPU");
  auto options = std::make_shared<CompileOptions>();
  verb->add_option("problems", options->problems,
                   "Problem lines with wishes, or files of them; arch=… in a line limits it to those architectures");
  verb->add_option("--list", options->lists, "File of problem lines, as src/cuda/aot/kernels.list; may be repeated");
  verb->add_flag("--spread", options->spread,
                 "Only as many kernels as have every value of every field of a configuration on every architecture");
  verb->add_option("--source", options->sources, "A kernel's source file instead; may be repeated");
  verb->add_option("--arch", options->architectures, "Architectures: sm_80,sm_89,sm_90a,sm_100f,sm_120f")
      ->delimiter(',')
      ->required();
  verb->add_option("--cache", options->cache, "Look up and keep kernels in this cache folder");
  verb->add_option(
      "--pack", options->pack,
      "Write all kernels, if all compile, into this file: tessera.pack beside the package, TESSERA_PACK in the"
      " environment, or embedded (TESSERA_CUDA_PACK)");
  add_number(*verb, "--jobs", options->jobs, 1, 256, "Compilations at once")->default_str("1");
  verb->add_option("--headers", options->headers, "A src folder to read device headers from, not the embedded ones");
  verb->add_option("--nvrtc", options->nvrtc, "libnvrtc, or a folder that holds it");
  add_text_options(*verb, options->texts);
  verb->add_option("--cubin", options->cubin, "Write the largest kernel's cubin here");
  verb->add_flag("--verbose", options->verbose, "Print the compiler's whole log");
  verb->footer(R"(Exit code 1 when a kernel does not compile, spills registers, uses local memory, asks for more shared
memory than the architecture has, or loses speed by what the assembler says of it.

Examples:
  tessera compile --list src/cuda/aot/kernels.list --arch sm_80,sm_89,sm_90a,sm_100f,sm_120f --jobs 2
  tessera compile "attention sq=4096 hq=32 hkv=8 d=128 dtype=bf16 causal" --arch sm_90a --cache ~/.cache/tessera
  tessera compile --list kernels.list --arch sm_90a --pack tessera.pack && TESSERA_PACK=tessera.pack tessera info
  tessera compile --source kernel.cu --arch sm_90a --headers src)");
  verb->callback([options, &exit_code] {
    if (options->problems.empty() && options->lists.empty() && options->sources.empty()) {
      throw Error(ErrorCode::invalid_argument, "compile", "nothing", "problem lines, --list or --source");
    }
    compile(*options, exit_code);
  });
}

}  // namespace tessera::cli
