// SPDX-License-Identifier: Apache-2.0
// The tensors of a problem that hold values (not lengths, tables or lists): which slots, dtypes and contiguous shapes,
// by the rules of its operation (src/operations).
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "files/array.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cli {

struct SlotShape {
  Slot slot = Slot::q;
  DType dtype = DType::fp32;
  std::vector<std::int64_t> shape;
  bool written = false;
};

/// What a run reads as values and must have: q, k, v, o_parts, dout, sink, …; what is changed in place (the cache of
/// kv_append, the states of linear_decode) too.
std::vector<SlotShape> value_inputs(const Problem& problem);
/// What a run writes, without what it changes in place.
std::vector<SlotShape> outputs(const Problem& problem);

using Arrays = std::map<Slot, files::Array>;

/// Allocates every output that `arrays` does not hold yet.
void allocate_outputs(const Problem& problem, Arrays& arrays);
/// Bindings of all of them.
Bindings bindings_of(const Arrays& arrays);

}  // namespace tessera::cli
