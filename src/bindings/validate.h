// SPDX-License-Identifier: Apache-2.0
// All checks of bindings against a problem. Backends rely on them.
#pragma once

#include "bindings/slot_rules.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::detail {

/// Throws Error on the first violation: a required slot that is unbound, a bound slot that the problem does not use, a
/// wrong rank, shape, dtype, device, stride or alignment to the element, an output that overlaps itself, an input or
/// another output, metadata (cu_seqlens, seqused, page ids, list counts and indices) out of range or unsorted.
/// Allocates nothing if there is none. `device` is where tensors must live. On CUDA, their contents are not read, and
/// rows must also be aligned as check_rows() says.
void validate(const Problem& problem, const Bindings& bindings, Device device);
/// The same, with the rules that slot_rules(problem) has returned.
void validate(const Problem& problem, const SlotRules& rules, const Bindings& bindings, Device device);

}  // namespace tessera::detail
