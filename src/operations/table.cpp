// SPDX-License-Identifier: Apache-2.0
#include "operations/table.h"

#include <array>
#include <cstddef>

namespace tessera::detail {
namespace {

constexpr std::array kTable = {&kAttention, &kCombine, &kKvAppend, &kLinearDecode, &kLinearChunk};

}  // namespace

std::span<const OperationRules* const> operations() noexcept { return kTable; }

const OperationRules& rules_of(Operation operation) noexcept { return *kTable[static_cast<std::size_t>(operation)]; }

}  // namespace tessera::detail
