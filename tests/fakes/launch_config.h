// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// CUlaunchConfig, as cuLaunchKernelEx takes it.
struct LaunchConfig {
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t shared_bytes;
  void* stream;
  void* attributes;
  std::uint32_t attribute_count;
};
