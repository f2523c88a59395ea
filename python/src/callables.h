// SPDX-License-Identifier: Apache-2.0
// Score and mask functions written in Python. They are called once an element, with the interpreter lock held.
#pragma once

#include <nanobind/nanobind.h>

#include "tessera/executor.h"

namespace tessera::python {

/// score(score, batch, head, query, key) -> float, all positions. For a backward the object has an attribute
/// `derivative` of the same signature: d value / d score. mask(batch, head, query, key) -> bool. None: not bound.
/// Must outlive the bindings that use it. An exception of the function ends the run and passes through it.
class Callables {
 public:
  Callables(nanobind::handle score, nanobind::handle mask);
  [[nodiscard]] bool any() const noexcept { return score_.is_valid() || mask_.is_valid(); }
  /// "score" or "mask", whichever is bound, for errors.
  [[nodiscard]] const char* name() const noexcept { return score_.is_valid() ? "score" : "mask"; }
  void bind(Bindings& bindings);

 private:
  static double value(double score, const ScorePoint& at, void* self);
  static double derivative(double score, const ScorePoint& at, void* self);
  static bool visible(const ScorePoint& at, void* self);

  nanobind::object score_, derivative_, mask_;
};

}  // namespace tessera::python
