// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

/// What nvrtcProgram points at.
struct FakeProgram {
  std::string source;
  std::vector<std::pair<std::string, std::string>> headers;  // name and text
  std::string log, cubin;
};
