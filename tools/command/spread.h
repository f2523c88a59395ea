// SPDX-License-Identifier: Apache-2.0
// Which kernels of a list are compiled where not all are. In a header alone, because tests take it from here.
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cases/random/spread.h"

namespace tessera::cli {

struct ListedKernel {
  std::string name;
  std::string architecture;
};

/// "ARCHITECTURE FAMILY word" of every word of the name, of which the first is the family.
inline std::vector<std::string> words_of(const ListedKernel& kernel) {
  std::istringstream text(kernel.name);
  std::vector<std::string> words;
  std::string front;
  for (std::string word; text >> word;) {
    if (front.empty()) front = kernel.architecture + " " + word + " ";
    words.push_back(front);
    words.back() += word;
  }
  return words;
}

/// Indices of kernels that have, for each architecture and family, every word of every name: so every value of every
/// field of a configuration, and every built-in callable.
inline std::set<std::size_t> spread_of(std::span<const ListedKernel> kernels) {
  std::vector<std::vector<std::string>> words;
  words.reserve(kernels.size());
  for (const ListedKernel& kernel : kernels) words.push_back(words_of(kernel));
  return cases::cover(std::move(words));
}

}  // namespace tessera::cli
