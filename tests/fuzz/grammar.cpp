// SPDX-License-Identifier: Apache-2.0
// Any text as a problem: either an Error, or a problem whose text form parses back to an equal problem and to the same
// text, and which the table of implementations can be asked about.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tessera/error.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  Problem problem;
  try {
    problem = Problem::parse(text);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) std::abort();
    return 0;
  }
  problem.check();
  const std::string line = problem.to_string();
  const Problem again = Problem::parse(line);
  if (!(again == problem) || again.to_string() != line) std::abort();
  const Support support = supports(problem, Target::cpu(2));
  if (!support.ok && support.reason.empty()) std::abort();
  return 0;
}
