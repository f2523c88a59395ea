// SPDX-License-Identifier: Apache-2.0
// Scores and masks of one's own under a name that problems use: C++ text that kernels are compiled with, for CUDA, and
// a host function for the CPU. docs/semantics.md, section 4, says when they are called.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/executor.h"
#include "tessera/tensor.h"

namespace tessera {

/// Extra tensors that the score and the mask of one problem have together, at most: slots extra0 to extra3.
inline constexpr int kMaxExtras = 4;

/// A tensor that a text reads, element by element. Any shape of this rank without an empty dimension may be bound.
struct ExtraTensor {
  std::string name;           // a C++ identifier: the text reads name(i, j)
  DType dtype = DType::fp32;  // fp32, fp16 or bf16, read as float; int32, int64 or uint8, read as they are
  int rank = 1;               // 0 to 4, and as many indices
  bool operator==(const ExtraTensor&) const = default;
};

/// The extra tensors of a call, as a host function reads them.
class Extras {
 public:
  /// `tensors`: (count), on the CPU; must outlive this.
  Extras(const Tensor* tensors, int count) noexcept : tensors_(tensors), count_(count) {}
  [[nodiscard]] int count() const noexcept { return count_; }
  [[nodiscard]] const Tensor& tensor(int which) const noexcept { return tensors_[which]; }
  /// An element of the tensor `which`, in the order of registration. An index outside is moved to the nearest inside.
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

/// `text`: a C++ expression, or a function's body if it has a `return`, of
///   score                                     float, after scale and softcap
///   at.batch, at.head, at.query, at.key       64-bit positions, see ScorePoint; as Position(at.query) in 32 bits too
///   NAME(i, …)                                each extra tensor
/// and of CUDA's mathematical functions. Its value is the new score. Indices outside an extra tensor are moved to the
/// nearest inside. It may also be asked about rows and keys beyond the ends of a sequence, whose answers are dropped.
/// A text that returns `linear_score(score, slope, distance)`, where `distance` is key − query and `slope` follows from
/// neither and not from the score, says score + slope · distance, which SM90 adds by parts almost for nothing.
/// `derivative_text`: likewise, of the same names; its value is d new score / d score at `score`. A backward on CUDA
/// needs it; that by extra tensors is not found. The text 1, of a score that adds something to its argument, costs
/// nothing.
struct ScoreText {
  std::string text;
  std::vector<ExtraTensor> extras = {};  // bound as extra0, …
  // For the CPU when the bindings hold no ScoreFunction: the same, and its derivative by the score for a backward.
  double (*value)(double score, const ScorePoint& at, const Extras& extras, void* user) = nullptr;
  double (*derivative)(double score, const ScorePoint& at, const Extras& extras, void* user) = nullptr;
  void* user = nullptr;  // as long as the process
  std::optional<std::string> derivative_text = std::nullopt;
  // Instead of host functions: what the texts say as steps that the CPU runs on whole tiles. It is written by
  // python/tessera/expressions, src/problem/expressions/expression.h describes it; empty: none.
  std::string program = {};
  bool operator==(const ScoreText&) const = default;
};

/// As ScoreText without `score`; its value is whether the key is visible.
struct MaskText {
  std::string text;
  std::vector<ExtraTensor> extras;  // bound behind those of the problem's score
  bool (*visible)(const ScorePoint& at, const Extras& extras, void* user) = nullptr;
  void* user = nullptr;
  std::string program = {};  // likewise; the CPU also finds by it which tiles hide nothing and which hide all
  bool operator==(const MaskText&) const = default;
};

/// Gives a name to a score or a mask, in this process, for good; from any thread. A problem may name it in score= or
/// mask=, and plans that are made after this know it. The text is compiled when a plan's kernel is: what is wrong with
/// it is said then, as Error{invalid_argument} about "score NAME" with the compiler's words and lines of the text.
/// Registering the same once more does nothing. Throws Error{invalid_argument} about
///   name     empty, of other characters than letters, digits and _ - . : /, a built-in's, or another text's
///   text, derivative_text    empty, or with a zero byte
///   extras   more than kMaxExtras, a name that is no identifier, or twice, another dtype or rank
///   program  one that cannot be, or beside a host function
void register_score(std::string_view name, ScoreText text);
void register_mask(std::string_view name, MaskText text);

/// What is registered; nullptr for nothing. Valid as long as the process.
const ScoreText* registered_score(std::string_view name) noexcept;
const MaskText* registered_mask(std::string_view name) noexcept;

}  // namespace tessera
