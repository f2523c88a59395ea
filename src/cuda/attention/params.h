// SPDX-License-Identifier: Apache-2.0
// Builds the parameters of a forward kernel from a problem's bindings.
#pragma once

#include <span>

#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

bool is_paged(const KvSource& source);

/// Throws Error{unsupported} if a row stride of one of `slots`, in bytes, does not fit into 32 bits.
void check_row_strides(const Bindings& bindings, std::span<const Slot> slots);

/// Strides of batches (0 for packed sequences), rows and heads of (batch, row, head, dim) or (row, head, dim).
Strides row_strides(const Tensor& tensor);
/// The same for (batch, head, row) or (head, row).
Strides lse_strides(const Tensor& tensor);
/// The first (0) or second (1) source of keys.
KvParams kv_params(const KvSource& source, const Bindings& bindings, int segment);

/// Pointers, strides and scalars of a forward. `group`: heads packed into the rows of a tile.
FwdParams fwd_params(const Problem& problem, const Bindings& bindings, int group);

}  // namespace tessera::cuda
