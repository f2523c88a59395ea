// SPDX-License-Identifier: Apache-2.0
// What an operation adds to what all problems share: its keys of the problem line, its rules and its tensors. Each
// operation is a file of src/operations and a row of the table there.
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

  /// Reads the keys of the line, without the first word. The result need not pass check().
  void (*parse)(const LineReader& line, Problem& problem);
  /// Writes the same keys in the order of docs/grammar.md, without those that have their defaults.
  void (*print)(LineWriter& line, const Problem& problem);
  /// Refuses problems that are invalid for the operation. The rules that all operations share have been checked before.
  void (*check)(const Problem& problem);
  /// The name of a set field that only some operations have, this one among them; "" if no such field is set.
  /// Operations with the same such fields share the function; the others refuse the fields. nullptr: it has none.
  std::string_view (*own_field)(const Problem& problem) = nullptr;

  /// Refuses valid problems that have no defined result in any implementation. nullptr: there are none.
  Support (*is_defined)(const Problem& problem) = nullptr;

  /// Which tensors a call takes.
  void (*tensors)(RuleWriter& rules, const Problem& problem);
  /// Checks which optional tensors must be bound together. nullptr: no rule.
  void (*check_bound)(const Problem& problem, const Bindings& bindings) = nullptr;
  /// Checks the contents of tensors in host memory. Each tensor has passed its SlotRule.
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
