// SPDX-License-Identifier: Apache-2.0
// Which kernels a backward runs.
#pragma once

#include "shared/backward.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The target's best configuration of a pass.
BwdConfig bwd_config(const Problem& problem, const Target& target, Products products, Gradients of);
/// Whether the pass by keys finds dQ too, which is faster; its sums have a fixed order only where the problem wants it.
bool finds_all(const Problem& problem, const Target& target, Products products);
/// Whether blocks of a list have fewer rows than tiles of wgmma, which would look each element up in the list, and
/// mma.sync finds all gradients in tiles that they do not cut.
bool prefers_mma(const Problem& problem, const Target& target);
/// How many blocks share a tile of keys (RowParts): one where these are enough for the target, or `batch_invariant`.
std::int64_t choose_row_parts(const Problem& problem, const BwdConfig& keys, const Target& target);
/// How many key heads have blocks side by side in the grid (KeyBlock). `key_tiles`: of a head, at least 1.
std::int64_t key_l2_heads(const Problem& problem, const BwdConfig& keys, std::int64_t key_tiles, int multiprocessors);
/// `keys`: of the pass behind it that finds gradients of keys, or all.
RowValuesConfig row_values_config(const Problem& problem, const BwdConfig& keys);

}  // namespace tessera::cuda
