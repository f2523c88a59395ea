// SPDX-License-Identifier: Apache-2.0
// An expression (src/problem/expressions) in the form that kernels run on tiles of scores: on lanes of one axis. A
// value that does not change along an axis is computed once for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/expressions/expression.h"
#include "tessera/tensor.h"

namespace tessera::cpu {

inline constexpr int kExpressionLanes = 64;
inline constexpr int kExpressionSlots = 64;

/// When a step is computed: once per tile, for all lines of the outer axis at once, for all lanes of the inner axis at
/// once, or again for each line.
enum class LaneStage : std::uint8_t { fixed, outer, inner, element };

struct LaneOperand {
  std::uint8_t slot;
  LaneStage stage;  // fixed and outer: one number for all lanes, except in steps of the same stage
};

struct LaneStep {
  detail::ExpressionOp op;
  detail::ExpressionType type;
  detail::ExpressionType operand;
  std::uint8_t operands;
  bool in_value;
  std::int16_t tensor;
  std::uint8_t out;  // slot
  LaneStage stage;
  LaneOperand from[4];
  float real;
  std::int64_t integer;
};

/// The steps in the order of their stages. `usable` is false if more than kExpressionSlots values are alive at once.
struct LaneProgram {
  LaneStep steps[detail::Expression::kMostSteps];
  int end[4];  // of each stage's steps
  LaneOperand value, derivative;
  bool has_derivative;
  bool usable;
};

/// A tile: element (outer o, inner i) is at s[o·stride + i].
struct LaneTile {
  float* s;
  std::ptrdiff_t stride;
  std::int64_t outer, inner;
  const std::int64_t* outer_position;  // (outer)
  const std::int64_t* inner_position;  // (inner)
  const std::int32_t* head;            // of each query, the inner axis or the outer one
  bool inner_is_query;
  std::int64_t batch, head_offset;
  const Tensor* tensors;
};

/// Dropout by Philox (docs/semantics.md): an element is kept if its 16 random bits are below the threshold. `heads`:
/// the number of query heads.
struct DropoutLanes {
  std::uint32_t key[2];
  std::uint32_t offset;
  std::uint32_t threshold;
  std::int64_t heads;
};

}  // namespace tessera::cpu
