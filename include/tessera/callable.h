// SPDX-License-Identifier: Apache-2.0
// User-defined scores and masks, registered under a name that problems use. For CUDA they are C++ text that is compiled
// into kernels, for the CPU a host function or a program. docs/semantics.md, section 4, says when they are called.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/executor.h"
#include "tessera/tensor.h"

namespace tessera {

/// The most extra tensors that the score and the mask of one problem may have together: slots extra0 to extra3.
inline constexpr int kMaxExtras = 4;

/// A tensor of which a text reads elements. Any tensor of this rank without an empty dimension may be bound.
struct ExtraTensor {
  std::string name;           // a C++ identifier: the text reads name(i, j)
  DType dtype = DType::fp32;  // fp32, fp16 or bf16, read as float; int32, int64 or uint8, read as they are
  int rank = 1;               // 0 to 4, also the number of indices
  bool operator==(const ExtraTensor&) const = default;
};

/// The extra tensors of a call, for a host function.
class Extras {
 public:
  /// `tensors`: (count), on the CPU; must outlive this.
  Extras(const Tensor* tensors, int count) noexcept : tensors_(tensors), count_(count) {}
  [[nodiscard]] int count() const noexcept { return count_; }
  [[nodiscard]] const Tensor& tensor(int which) const noexcept { return tensors_[which]; }
  /// The element of tensor number `which`, in the order of registration. Each index is clamped to its dimension.
  template <class... Index>
  double operator()(int which, Index... index) const noexcept {
    const std::int64_t at[] = {static_cast<std::int64_t>(index)..., 0};
    return element(tensors_[which], at, static_cast<int>(sizeof...(Index)));
  }

 private:
  static double element(const Tensor& tensor, const std::int64_t* at, int rank) noexcept;

  const Tensor* tensors_;
  int count_;
};

/// `text`: a C++ expression, or a function body if it contains `return`. It may use
///   score                                     float, after scale and softcap
///   at.batch, at.head, at.query, at.key       64-bit positions, see ScorePoint
///   Position(at.query)                        the same with 32 bits if positions are small
///   NAME(i, …)                                each extra tensor
/// and CUDA's mathematical functions. Its value is the new score. Each index of an extra tensor is clamped to its
/// dimension. The text may also be evaluated for rows and keys beyond the ends of a sequence; these values are dropped.
/// A text may return `linear_score(score, slope, distance)`, where `distance` is key − query and `slope` depends on
/// none of query, key and score. This is score + slope · distance, and SM90 adds it at almost no cost.
/// `derivative_text`: text over the same names; its value is d new score / d score at `score`. A backward on CUDA needs
/// it. Gradients of extra tensors are not computed. The text 1, for a score that only adds a term, costs nothing.
struct ScoreText {
  std::string text;
  std::vector<ExtraTensor> extras = {};  // bound as extra0, …
  // Host functions for the CPU, used if the bindings hold no ScoreFunction: the new score, and for a backward its
  // derivative by the score.
  double (*value)(double score, const ScorePoint& at, const Extras& extras, void* user) = nullptr;
  double (*derivative)(double score, const ScorePoint& at, const Extras& extras, void* user) = nullptr;
  void* user = nullptr;  // must be valid as long as the process
  std::optional<std::string> derivative_text = std::nullopt;
  // Instead of host functions: the same computation as a program, which the CPU runs on whole tiles. It is written by
  // python/tessera/expressions and described in src/problem/expressions/expression.h; empty: none.
  std::string program = {};
  bool operator==(const ScoreText&) const = default;
};

/// As ScoreText, but without `score`; its value says whether the key is visible.
struct MaskText {
  std::string text;
  std::vector<ExtraTensor> extras;  // bound after those of the problem's score
  bool (*visible)(const ScorePoint& at, const Extras& extras, void* user) = nullptr;
  void* user = nullptr;
  std::string program = {};  // likewise; with it the CPU also finds tiles that are wholly visible or wholly masked
  bool operator==(const MaskText&) const = default;
};

/// Registers a score or a mask under a name, for the life of the process; any thread may call this. A problem may name
/// it in score= or mask=, and plans that are made later know it. The text is compiled with a plan's kernel. Its errors
/// are reported then, as Error{invalid_argument} about "score NAME" with the compiler's messages and the text's line
/// numbers. Registering the same text again does nothing. Throws Error{invalid_argument} about
///   name     empty, longer than 64, with characters besides letters, digits and _ - . : /, a built-in's, or in use for
///            another text
///   text, derivative_text    empty, or with a zero byte
///   extras   more than kMaxExtras, a name that is no identifier or occurs twice, a dtype or rank not listed above
///   program  malformed, or given beside a host function
void register_score(std::string_view name, ScoreText text);
void register_mask(std::string_view name, MaskText text);

/// The text registered under this name, valid as long as the process; nullptr if there is none.
const ScoreText* registered_score(std::string_view name) noexcept;
const MaskText* registered_mask(std::string_view name) noexcept;

}  // namespace tessera
