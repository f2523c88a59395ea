// SPDX-License-Identifier: Apache-2.0
// A kernel as text, which the backend of a plan's device compiles before the first run.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::detail {

/// About ten lines of source that instantiate one configuration of one kernel.
struct KernelSource {
  std::string name;  // for people: logs, tables
  std::string text;
  std::size_t shared_bytes = 0;  // dynamic shared memory of a launch, if known: for tables only
  // Names that #line gives to users' texts, such as "score bias". Compiler errors in them are for the user to fix.
  std::vector<std::string> user_texts{};
};

}  // namespace tessera::detail
