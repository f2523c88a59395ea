// SPDX-License-Identifier: Apache-2.0
// The score and mask of a problem as a kernel's source names them: a built-in type, or one written around a user's
// text.
#pragma once

#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/problem.h"

namespace tessera::cuda {

struct CallableSource {
  std::string type = "NoCallable";
  std::string word;                // in the kernel's name: " RelativeScore", " score=bias"; "" for none
  std::string definition;          // of `type`, if it is written around a user's text
  std::vector<std::string> files;  // that #line names in it: "score bias"
};

struct CallableSources {
  CallableSource score;
  CallableSource mask;

  /// "Callables<RelativeScore, NoCallable>"
  [[nodiscard]] std::string type() const { return "Callables<" + score.type + ", " + mask.type + ">"; }
  /// Follows the words of the configuration in a kernel's name.
  [[nodiscard]] std::string words() const { return score.word + mask.word; }
  [[nodiscard]] std::string definitions() const { return score.definition + mask.definition; }
  /// For KernelSource::user_texts.
  [[nodiscard]] std::vector<std::string> files() const;
};

/// Whether the callables that a problem names are built in or registered; the score of a backward must have a
/// derivative, too.
Support has_callables(const Problem& problem);

/// Whether the problem's score is a text that returns linear_score() (scores/text_functions.cuh).
bool has_linear_score(const Problem& problem);

/// Whether the problem has a mask whose answers are the same for all heads, as far as its text tells.
bool has_shared_mask(const Problem& problem);

/// Whether the derivative of the problem's score is known to be 1, so that what it adds to a product does not depend on
/// the product.
bool has_additive_score(const Problem& problem);

/// Sources of the callables of a problem for which has_callables() holds.
CallableSources callable_sources(const Problem& problem);

}  // namespace tessera::cuda
