// SPDX-License-Identifier: Apache-2.0
// What this machine is: printed by `tessera info` and stored with every measurement.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/cuda.h"

namespace tessera::cli {

struct Machine {
  std::string cpu;       // model name
  std::string identity;  // family, model and stepping, where the name says little
  int cores_online = 0;
  int cores_usable = 0;  // by the affinity of this process
  std::uint64_t memory_bytes = 0;
  std::vector<std::string> caches;  // "L1d 48 KiB", per instance
  std::vector<std::string> isas;    // that the library has and this machine can run, best first
  int driver_version = 0;           // CUDA driver, 13000 for 13.0; 0: no driver
  std::string gpu_note;             // why there are no GPUs
  std::vector<cuda::Device> gpus;
};

/// Reads /proc and /sys and asks the CUDA driver where there is one.
Machine describe_machine();
/// A folder name for results: lower-case letters, digits and '-', with family and model of a processor whose name has
/// no number, for example "amd-epyc-f26-m2-2c".
std::string folder_name(const Machine& machine);
/// The same of a processor's or GPU's name: "nvidia-h100-80gb-hbm3".
std::string folder_name(const std::string& name);

}  // namespace tessera::cli
