// SPDX-License-Identifier: Apache-2.0
// What of a problem a forward's configuration says before its tiles are chosen.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Query heads that share the rows of a tile: those of a group, or 1.
std::int64_t packed_heads(const Problem& problem);
/// Keys of both sources, by capacity.
std::int64_t count_keys(const Problem& problem);

/// Types, head dims, sources, masks and scores; tiles, products and loader are as by default.
FwdConfig features_of(const Problem& problem, std::int64_t splits);

/// By wgmma: a score that is linear in key − query leaves scales to be fused.
void choose_linear_score(FwdConfig& config, const Problem& problem);

/// One source of rows at strides, a range of tiles, outputs of the inputs' type, no callables; scores may be capped or
/// biased.
bool walks_plainly(const FwdConfig& config);
/// The same with the plainest softmax.
bool is_plain(const FwdConfig& config);

}  // namespace tessera::cuda
