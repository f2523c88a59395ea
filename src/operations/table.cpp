// SPDX-License-Identifier: Apache-2.0
#include "operations/table.h"

#include <cstddef>

namespace tessera::detail {

std::span<const OperationRules* const> operations() noexcept { return kOperations; }

const OperationRules& rules_of(Operation operation) noexcept {
  return *kOperations[static_cast<std::size_t>(operation)];
}

const OperationRules* operation_named(std::string_view name) noexcept {
  for (const OperationRules* rules : kOperations) {
    if (rules->name == name) return rules;
  }
  return nullptr;
}

std::string operation_names() {
  std::string names;
  for (const OperationRules* rules : kOperations) names.append(names.empty() ? "one of " : ", ").append(rules->name);
  return names;
}

}  // namespace tessera::detail
