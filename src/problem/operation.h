// SPDX-License-Identifier: Apache-2.0
// What an operation adds to what all problems share: its keys of the problem line, its rules and its tensors. Each is a
// file of src/operations and a row of the table there.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "tessera/error.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::detail {

class LineReader;
class LineWriter;
class RuleWriter;  // src/bindings/rule_writer.h

struct OperationRules {
  Operation operation;
  std::string_view name;  // first word of the problem line

  /// Reads all keys of the line but the first word. The result need not pass check().
  void (*parse)(const LineReader& line, Problem& problem);
  /// Writes the same keys in the order of docs/grammar.md, without those that have their defaults.
  void (*print)(LineWriter& line, const Problem& problem);
  /// Refuses what the operation cannot mean; what all operations share has been checked.
  void (*check)(const Problem& problem);
  /// A field that has a meaning here and not for all operations, and that is not at its default; "" for none.
  /// Operations that share such fields share the function. The other operations refuse the field. nullptr: none.
  std::string_view (*own_field)(const Problem& problem) = nullptr;

  /// What is well formed and yet has no defined result, whoever would compute it. nullptr: nothing.
  Support (*is_defined)(const Problem& problem) = nullptr;

  /// Which tensors a call takes.
  void (*tensors)(RuleWriter& rules, const Problem& problem);
  /// Which of the optional tensors have to be bound together. nullptr: any.
  void (*check_bound)(const Problem& problem, const Bindings& bindings) = nullptr;
  /// What is inside tensors in host memory, each of which follows its rule.
  void (*check_values)(const Problem& problem, const Bindings& bindings);
};

/// In the order of enum Operation; the table is src/operations/table.h.
std::span<const OperationRules* const> operations() noexcept;
const OperationRules& rules_of(Operation operation) noexcept;
/// nullptr: there is none of this name.
const OperationRules* operation_named(std::string_view name) noexcept;
/// "one of attention, combine, …"
std::string operation_names();
inline std::string_view name_of(Operation operation) noexcept { return rules_of(operation).name; }

}  // namespace tessera::detail
