// SPDX-License-Identifier: Apache-2.0
// A kernel as text, which the backend of a plan's device compiles before the first run.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::detail {

/// About ten lines of source that name one configuration of one kernel.
struct KernelSource {
  std::string name;  // for people: logs, tables
  std::string text;
  std::size_t shared_bytes = 0;  // dynamic shared memory that launches ask for, if known: for tables only
  // Files that #line names in the text, for what users wrote: "score bias". What the compiler says of one is the
  // user's to mend.
  std::vector<std::string> user_texts{};
};

}  // namespace tessera::detail
