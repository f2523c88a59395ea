// SPDX-License-Identifier: Apache-2.0
// What the oracle's linear operations share: elements of states and of results.
#pragma once

#include "cpu/reference/number.h"
#include "cpu/reference/reference.h"

namespace tessera::reference {

/// Sets element `index` of a result. In plain arithmetic it is rounded to the tensor's type.
template <class Real>
void put_result(Output& output, DType dtype, std::int64_t index, double value) {
  const bool plain = sizeof(Real) == sizeof(float);
  output.set(index, plain ? static_cast<double>(round_to(dtype, static_cast<float>(value))) : value);
}

/// Index of S(k, v) of a head among the elements of states; `outer`: slot, or sequence.
inline std::int64_t state_element(const Problem& p, std::int64_t outer, std::int64_t h, std::int64_t v,
                                  std::int64_t k) {
  const std::int64_t head = outer * p.heads_q + h;
  if (p.linear.state_layout == StateLayout::vk) return (head * p.head_dim_v + v) * p.head_dim_qk + k;
  return (head * p.head_dim_qk + k) * p.head_dim_v + v;
}

}  // namespace tessera::reference
