// SPDX-License-Identifier: Apache-2.0
// The registry entries (tessera/callable.h) of the callables that a problem names, and their host functions in a run.
#pragma once

#include <optional>
#include <string_view>

#include "problem/expressions/expression.h"
#include "tessera/callable.h"
#include "tessera/problem.h"

namespace tessera::detail {

/// Throws Error{invalid_argument} unless a name has at most 64 letters, digits and _ - . : /, so that it can stand in a
/// problem line.
void check_callable_name(std::string_view argument, std::string_view name);

/// The entries of a problem's names. A pointer is nullptr if the name is empty, built in or left to the bindings, or if
/// the entry has no program. Entries live as long as the process.
struct RegisteredCallables {
  const ScoreText* score = nullptr;
  const MaskText* mask = nullptr;
  const Expression* score_program = nullptr;
  const Expression* mask_program = nullptr;

  RegisteredCallables() = default;
  explicit RegisteredCallables(const Problem& problem) noexcept;
  [[nodiscard]] int score_extras() const noexcept {
    return score != nullptr ? static_cast<int>(score->extras.size()) : 0;
  }
  [[nodiscard]] int mask_extras() const noexcept { return mask != nullptr ? static_cast<int>(mask->extras.size()) : 0; }
  /// The extra tensor of slot extra`i`, i below score_extras() + mask_extras().
  [[nodiscard]] const ExtraTensor& extra(int i) const noexcept {
    return i < score_extras() ? score->extras[static_cast<std::size_t>(i)]
                              : mask->extras[static_cast<std::size_t>(i - score_extras())];
  }
};

/// The slot of the i-th extra tensor. The score's come first, then the mask's.
constexpr Slot extra_slot(int i) noexcept { return static_cast<Slot>(static_cast<int>(Slot::extra0) + i); }

/// The bindings of one run, with registered host functions where the caller has bound none. For a device other than the
/// CPU, which cannot call them, these are the given bindings.
class HostCallables {
 public:
  /// `registered` and `given` must outlive this.
  HostCallables(const RegisteredCallables& registered, const Bindings& given, DeviceType device = DeviceType::cpu);
  HostCallables(const HostCallables&) = delete;
  HostCallables& operator=(const HostCallables&) = delete;
  [[nodiscard]] const Bindings& bindings() const noexcept { return filled_ ? *filled_ : given_; }

  /// A program and the extra tensors that it reads.
  struct Program {
    const Expression* expression = nullptr;
    const Extras* extras = nullptr;
  };
  /// The program that a callable of bindings() runs, if it is one of the registry.
  static Program program_of(const ScoreFunction& score) noexcept;
  static Program program_of(const MaskFunction& mask) noexcept;

 private:
  static double program_value(double score, const ScorePoint& at, void* self);
  static double program_derivative(double score, const ScorePoint& at, void* self);
  static bool program_visible(const ScorePoint& at, void* self);
  static TileClass program_classify(const TileBounds& tile, void* self);
  static double value(double score, const ScorePoint& at, void* self);
  static double derivative(double score, const ScorePoint& at, void* self);
  static bool visible(const ScorePoint& at, void* self);

  const Bindings& given_;
  const RegisteredCallables& registered_;
  Extras score_extras_;
  Extras mask_extras_;
  std::optional<Bindings> filled_;
};

}  // namespace tessera::detail
