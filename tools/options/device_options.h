// SPDX-License-Identifier: Apache-2.0
// --device and --emulate of the verbs that use a GPU, and what else goes with them where cases are checked.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cases/trial.h"

namespace tessera::cli {

struct PlaceOptions {
  std::string device = "cpu";
  std::string emulate;  // "80", "sm80" or "sm_80"

  /// nullopt for the CPU. Throws Error{invalid_argument} for another device than cpu, cuda or cuda:N, and what
  /// Target::cuda_device and Target::emulate throw.
  [[nodiscard]] std::optional<Target> target() const;
};
void add_place_options(CLI::App& verb, PlaceOptions& options);

struct DeviceOptions : PlaceOptions {
  std::vector<std::string> wishes;
  bool apart = false;

  /// nullopt for the CPU. Throws as target() does, and Error{parse} for a wish.
  [[nodiscard]] std::optional<cases::Gpu> gpu() const;
};
void add_device_options(CLI::App& verb, DeviceOptions& options);

/// "cuda" or "cuda:3" as 0 or 3; nullopt for "cpu". Throws Error{invalid_argument} otherwise.
std::optional<int> parse_device(const std::string& device);
/// "90" from "90", "sm90", "sm_90". Throws Error{invalid_argument}.
int parse_capability(const std::string& text);

}  // namespace tessera::cli
