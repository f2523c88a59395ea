// SPDX-License-Identifier: Apache-2.0
// The backends, and the table of all implementations: the CPU's, then CUDA's, each in the order of its
// implementations.h.
#include <algorithm>
#include <array>
#include <iterator>

#include "cpu/backend.h"
#include "cpu/implementations.h"
#include "cuda/backend.h"
#include "cuda/implementations.h"

namespace tessera::detail {

std::span<const Implementation* const> implementations() noexcept {
  static constexpr auto kTable = [] {
    std::array<const Implementation*, std::size(cpu::kImplementations) + std::size(cuda::kImplementations)> table{};
    std::copy(std::begin(cuda::kImplementations), std::end(cuda::kImplementations),
              std::copy(std::begin(cpu::kImplementations), std::end(cpu::kImplementations), table.begin()));
    return table;
  }();
  return kTable;
}

const Backend& backend(DeviceType device) noexcept {
  return device == DeviceType::cuda ? cuda::backend() : cpu::backend();
}

}  // namespace tessera::detail
