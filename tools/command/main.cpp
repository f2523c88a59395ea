// SPDX-License-Identifier: Apache-2.0
// The `tessera` command: one sub-command a verb, errors in one line on stderr, documented exit codes.
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <string>

#include "options/commands.h"
#include "options/number_option.h"
#include "tessera/version.h"

namespace tessera::cli {

int exit_code_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::out_of_range:
    case ErrorCode::overflow:
    case ErrorCode::parse:
      return kBadInput;
    case ErrorCode::unsupported:
      return kUnsupported;
    case ErrorCode::io:
      return kFileError;
    case ErrorCode::internal:
    case ErrorCode::cancelled:
      return kInternal;
  }
  return kInternal;
}

void add_target_options(CLI::App& verb, TargetOptions& options) {
  add_number(verb, "--threads", options.threads, 0, std::numeric_limits<int>::max(),
             "Worker threads; 0 is what OpenMP would use")
      ->default_str("0");
  verb.add_option("--isa", options.isa, "Instruction set to force, one of those that `tessera info` lists");
}

namespace {

constexpr const char* kFooter = R"(Exit codes:
  0 done                  3 no implementation supports the problem
  1 a check failed        4 a file could not be opened, read or written
  2 bad usage or input    5 a defect in tessera itself

Examples:
  tessera info
  tessera doctor
  tessera explain "attention b=2 sq=1024 hq=8 hkv=2 d=64 dtype=bf16 causal"
  tessera run --in model.safetensors --prefix layer0. --out o.npy causal
  tessera verify tests/cases
  tessera bench bench/suites/cpu_dense.txt --peer torch_cpu --json out.json
  tessera random --count 1000 --seed 7
  tessera compile src/cuda/aot/kernels.list --arch sm_80,sm_90a

The text form of a problem is described in docs/grammar.md, the command in docs/cli.md.)";

// A message of several lines (the candidates of an unsupported problem) is kept on one.
std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos;) text.replace(at, 1, "; ");
  return text;
}

int fail(const std::string& text, int code) {
  std::fprintf(stderr, "tessera: %s\n", one_line(text).c_str());
  return code;
}

int run_command(int argc, char** argv) {
  int exit_code = kOk;
  CLI::App app{"Attention that computes the tiles it must and skips the rest.", "tessera"};
  app.set_version_flag("--version", std::string("tessera ") + version());
  app.require_subcommand(1);
  add_info(app, exit_code);
  add_doctor(app, exit_code);
  add_explain(app, exit_code);
  add_run(app, exit_code);
  add_verify(app, exit_code);
  add_bench(app, exit_code);
  add_random(app, exit_code);
  add_compile(app, exit_code);
  app.footer(kFooter);  // last: sub-commands made after it would inherit it
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked_for_text) {  // --help, --version
    app.exit(asked_for_text);
    return kOk;
  } catch (const CLI::ParseError& error) {
    const std::string first = argc > 1 ? argv[1] : "";
    if (app.get_subcommands().empty() && !first.empty() && first[0] != '-') {
      return fail("verb: got '" + first + "'; want info, doctor, explain, run, verify, bench, random or compile",
                  kBadInput);
    }
    return fail(std::string(error.what()) + " (see tessera --help)", kBadInput);
  } catch (const Error& error) {
    return fail(error.what(), exit_code_of(error.code()));
  } catch (const std::bad_alloc&) {
    return fail("memory: got no more from the system; want a smaller problem", kBadInput);
  } catch (const std::exception& error) {
    return fail(std::string("internal: ") + error.what(), kInternal);
  }
  return exit_code;
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) { return tessera::cli::run_command(argc, argv); }
