// SPDX-License-Identifier: Apache-2.0
// The part of a forward's configuration that follows from the problem, before its tiles are chosen.
#pragma once

#include <cstdint>

#include "shared/config.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Returns how many query heads are packed into the rows of a tile: those of a group, or 1.
std::int64_t packed_heads(const Problem& problem);
/// Returns the number of keys of both sources, by capacity.
std::int64_t count_keys(const Problem& problem);

/// Sets types, head dims, sources, masks and scores. Tiles, products and loader keep their defaults.
FwdConfig features_of(const Problem& problem, std::int64_t splits);

/// For wgmma: sets linear_score if the score is linear in key − query, so that the scale can be fused.
void choose_linear_score(FwdConfig& config, const Problem& problem);

/// Whether the forward has one strided source, a range of tiles, outputs of the inputs' type (unless these have 8
/// bits), no dropout, no callables, and neither chunks nor compressed keys. Scores may have a softcap or ALiBi.
bool walks_plainly(const FwdConfig& config);
/// The same, without scale_first.
bool is_plain(const FwdConfig& config);

}  // namespace tessera::cuda
