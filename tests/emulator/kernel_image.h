// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace emulator {

/// In front of the shared object that the compiler makes of a kernel: a cubin says its own size, which the driver is
/// not told.
struct KernelImage {
  static constexpr std::uint64_t kMark = 0x6c656e72656b5f65;
  std::uint64_t mark = kMark;
  std::uint64_t bytes = 0;
};

}  // namespace emulator
