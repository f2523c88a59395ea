// SPDX-License-Identifier: Apache-2.0
// Which kernels of a list are compiled where not all are. In a header alone, because tests take it from here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

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
/// field of a configuration, and every built-in callable. Taken is, again and again, the kernel with the most words
/// that none of the taken has; of several the first.
inline std::set<std::size_t> spread_of(std::span<const ListedKernel> kernels) {
  std::vector<std::vector<std::string>> missing;  // of each kernel: words that no taken one has
  missing.reserve(kernels.size());
  for (const ListedKernel& kernel : kernels) missing.push_back(words_of(kernel));
  std::set<std::size_t> taken;
  while (true) {
    const auto most = std::max_element(missing.begin(), missing.end(),
                                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
    if (most == missing.end() || most->empty()) return taken;
    taken.insert(static_cast<std::size_t>(most - missing.begin()));
    const std::set<std::string> seen(most->begin(), most->end());
    for (std::vector<std::string>& words : missing) {
      std::erase_if(words, [&](const std::string& word) { return seen.contains(word); });
    }
  }
}

}  // namespace tessera::cli
