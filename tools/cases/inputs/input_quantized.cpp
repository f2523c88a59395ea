// SPDX-License-Identifier: Apache-2.0
// Operands of 8 bits: their descales, and what quantize is given.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/element.h"
#include "cases/inputs/inputs.h"
#include "cases/inputs/slot_shapes.h"
#include "cpu/reference/descales.h"
#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

/// From half to twice what makes N(0, 1) of elements; static ones leave the largest of N(0, 1) out of range.
double draw_descale(const Problem& problem, RandomNumbers& random) {
  const double spread = std::exp2(2 * static_cast<double>(random.below(1025)) / 1024 - 1);
  if (problem.operation != Operation::quantize) return spread / kQuantisedGain;
  const double largest = problem.o_type == DType::int8 ? 127 : reference::format_of(problem.o_type).largest;
  return 2 * spread / largest;
}

}  // namespace

/// Of rows in use; the others stay poisoned.
void Inputs::fill_query_descales(Slot slot, std::int64_t heads) {
  const Tensor& tensor = bindings_[slot];
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
  const bool by_head = problem_.quantization.grain == Grain::head;
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const reference::Rows& rows = sequences_.query[static_cast<std::size_t>(b)];
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < (by_head ? 1 : rows.length); ++i) {
        const std::int64_t at = reference::query_descale_offset(problem_, tensor, b, h, i, rows.first_token + i);
        reference::write(tensor, at, draw_descale(problem_, random));
      }
    }
  }
}

void Inputs::fill_key_descales(Slot slot) {
  const Tensor& tensor = bindings_[slot];
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
  const bool by_head = problem_.quantization.grain == Grain::head;
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const reference::Rows& rows = sequences_.keys[0][static_cast<std::size_t>(b)];
    for (std::int64_t h = 0; h < problem_.heads_kv; ++h) {
      for (std::int64_t j = 0; j < (by_head ? 1 : rows.length); ++j) {
        const std::int64_t token = by_head ? 0 : reference::key_token(problem_, bindings_, 0, b, rows, j);
        const std::int64_t at = reference::key_descale_offset(problem_, tensor, b, h, j, token);
        reference::write(tensor, at, draw_descale(problem_, random));
      }
    }
  }
}

void Inputs::bind_descales() {
  for (const cli::SlotShape& each : cli::value_inputs(problem_)) {
    switch (each.slot) {
      case Slot::q_descale:
        allocate(each.slot, each.dtype, each.shape);
        fill_query_descales(each.slot, problem_.heads_q);
        break;
      case Slot::k_descale:
      case Slot::v_descale:
        allocate(each.slot, each.dtype, each.shape);
        fill_key_descales(each.slot);
        break;
      case Slot::k_mean:
        allocate(each.slot, each.dtype, each.shape);
        fill(each.slot);
        break;
      default:
        break;
    }
  }
}

/// Where 3 divides the seed, every third row is 0, and so is the last head where 5 does.
void Inputs::bind_quantize() {
  bind_query_lengths();
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  const Tensor& x = allocate(Slot::x, problem_.q_type, query_shape(problem_.heads_q, problem_.head_dim_qk));
  fill_queries(Slot::x);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double special[] = {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity};
  for (const reference::Rows& rows : sequences_.query) {
    for (std::int64_t i = 0; i < rows.length; ++i) {
      const bool odd = std::find(values_.non_finite.begin(), values_.non_finite.end(), i) != values_.non_finite.end();
      for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
        const bool zero = (values_.seed % 3 == 0 && i % 3 == 0) || (values_.seed % 5 == 0 && h + 1 == problem_.heads_q);
        const std::int64_t at = reference::token_offset(x, rows.first_token + i, h);
        for (std::int64_t c = 0; c < problem_.head_dim_qk; ++c) {
          if (zero) reference::write(x, at + c, 0);
          if (odd && c % 7 < 3) reference::write(x, at + c, special[c % 7]);
        }
      }
    }
  }
  if (problem_.quantization.hadamard) bind_seeds();
  for (const cli::SlotShape& each : cli::outputs(problem_)) allocate(each.slot, each.dtype, each.shape, true);
  if (!problem_.quantization.given) return;
  for (const cli::SlotShape& each : cli::value_inputs(problem_)) {
    if (each.slot != Slot::x_descale) continue;
    allocate(each.slot, each.dtype, each.shape);
    fill_query_descales(each.slot, problem_.heads_q);
  }
}

}  // namespace tessera::cases
