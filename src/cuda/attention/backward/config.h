// SPDX-License-Identifier: Apache-2.0
// Which kernels a backward runs.
#pragma once

#include "shared/backward.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The target's best configuration of a pass.
BwdConfig bwd_config(const Problem& problem, const Target& target, Products products, Gradients of);
/// Whether the key pass computes dQ too, which is faster. Its sums have a fixed order only if the problem asks for
/// that.
bool finds_all(const Problem& problem, const Target& target, Products products);
/// Whether mma.sync should take a list: its blocks of queries cut the tiles of wgmma, which would look up each element
/// in the list, but not tiles in which mma.sync computes all gradients.
bool prefers_mma(const Problem& problem, const Target& target);
/// How many blocks share a tile of keys (RowParts): one if that makes enough blocks for the target, or with
/// `batch_invariant`.
std::int64_t choose_row_parts(const Problem& problem, const BwdConfig& keys, const Target& target);
/// How many key heads have their blocks side by side in the grid (KeyBlock). `key_tiles`: of a head, at least 1.
std::int64_t key_l2_heads(const Problem& problem, const BwdConfig& keys, std::int64_t key_tiles, int multiprocessors);
/// `keys`: the configuration of the key pass that follows.
RowValuesConfig row_values_config(const Problem& problem, const BwdConfig& keys);

}  // namespace tessera::cuda
