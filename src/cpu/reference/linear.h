// SPDX-License-Identifier: Apache-2.0
// The oracle's linear attention: the recurrence, one element of the state after another.
#pragma once

#include "cpu/reference/number.h"
#include "cpu/reference/reference.h"

namespace tessera::reference {

void linear_decode(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order,
                   Result& result);
/// Either pass.
void linear_chunk(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order,
                  Result& result);

/// Element `index` of a result: in plain arithmetic rounded to what the tensor holds.
template <class Real>
void put_result(Output& output, DType dtype, std::int64_t index, double value) {
  const bool plain = sizeof(Real) == sizeof(float);
  output.values[static_cast<std::size_t>(index)] =
      plain ? static_cast<double>(round_to(dtype, static_cast<float>(value))) : value;
  output.written[static_cast<std::size_t>(index)] = 1;
}

/// Index of S(k, v) of a head among the elements of states; `outer`: slot, or sequence.
inline std::int64_t state_element(const Problem& p, std::int64_t outer, std::int64_t h, std::int64_t v,
                                  std::int64_t k) {
  const std::int64_t head = outer * p.heads_q + h;
  if (p.linear.state_layout == StateLayout::vk) return (head * p.head_dim_v + v) * p.head_dim_qk + k;
  return (head * p.head_dim_qk + k) * p.head_dim_v + v;
}

}  // namespace tessera::reference
