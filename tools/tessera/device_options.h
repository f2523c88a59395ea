// SPDX-License-Identifier: Apache-2.0
// --device and what goes with it, shared by the verbs that check.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases/trial.h"

namespace tessera::cli {

struct DeviceOptions {
  std::string device = "cpu";
  std::string emulate;  // "80", "sm80" or "sm_80"
  std::vector<std::string> wishes;
  bool apart = false;

  /// nullopt for the CPU. Throws Error{invalid_argument} for another device than cpu, cuda or cuda:N, and what
  /// Target::cuda_device and Target::emulate throw. Kernels that are compiled are said on stderr.
  [[nodiscard]] std::optional<cases::Gpu> gpu() const;
};
void add_device_options(CLI::App& verb, DeviceOptions& options);

/// "cuda" or "cuda:3" as 0 or 3; nullopt for "cpu". Throws Error{invalid_argument} otherwise.
std::optional<int> parse_device(const std::string& device);
/// "90" from "90", "sm90", "sm_90". Throws Error{invalid_argument}.
int parse_capability(const std::string& text);

}  // namespace tessera::cli
