// SPDX-License-Identifier: Apache-2.0
#include "operations/table.h"

#include <cstddef>

namespace tessera::detail {

std::span<const OperationRules* const> operations() noexcept { return kOperations; }

const OperationRules& rules_of(Operation operation) noexcept {
  return *kOperations[static_cast<std::size_t>(operation)];
}

}  // namespace tessera::detail
