// SPDX-License-Identifier: Apache-2.0
// The verbs of the `tessera` command. Each registers its sub-command and options; its callback does the work and sets
// `exit_code` when the work ended without an exception but not well. Exceptions are turned into exit codes by main().
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tessera/error.h"
#include "tessera/plan.h"

namespace tessera::cli {

enum ExitCode : int {
  kOk = 0,
  kCheckFailed = 1,  // verify or random found a failure, bench a regression
  kBadInput = 2,     // bad usage, problem text, file contents or tensors
  kUnsupported = 3,  // well formed, but no implementation does it
  kFileError = 4,    // a file that cannot be opened, read or written
  kInternal = 5,     // a defect in Tessera
};

/// The exit code of an Error.
int exit_code_of(ErrorCode code) noexcept;

/// --threads and --isa, shared by the verbs that compute.
struct TargetOptions {
  int threads = 0;
  std::string isa;
  [[nodiscard]] Target target() const { return Target::cpu(threads, isa); }
};
void add_target_options(CLI::App& verb, TargetOptions& options);

void add_info(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_explain(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_verify(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_random(CLI::App& app, int& exit_code);
void add_compile(CLI::App& app, int& exit_code);

}  // namespace tessera::cli
