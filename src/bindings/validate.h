// SPDX-License-Identifier: Apache-2.0
// Every user-facing check of bindings against a problem, once. Backends trust what passed here.
#pragma once

#include "bindings/slot_rules.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::detail {

/// Throws Error on the first violation: a required slot that is unbound, a bound slot the problem has no use for, rank,
/// shape, dtype, device, stride, alignment to the element, an output that overlaps itself, an input or another output,
/// metadata (cu_seqlens, seqused, page ids, list counts and indices) out of range or unsorted.
/// Does not allocate when everything is right. `device` is where tensors must live; on CUDA what is inside them is not
/// read, and rows of heads and dims must be aligned to 16 bytes.
void validate(const Problem& problem, const Bindings& bindings, Device device);
/// With the rules of the problem at hand: slot_rules(problem).
void validate(const Problem& problem, const SlotRules& rules, const Bindings& bindings, Device device);

}  // namespace tessera::detail
