// SPDX-License-Identifier: Apache-2.0
// Skip states that a forward advances in place: the parameters of its kernels, and the workspace that they need.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/backend.h"
#include "shared/config.h"
#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

Skip skip_of(const Problem& problem);

/// Whether kernels can advance the problem's skip state.
Support supports_skip(const Problem& problem);
/// The same for the chosen tiles: a row tile must own a row of the list, and a tile of keys must lie in one key block.
Support supports_skip_tiles(const FwdConfig& config, const Problem& problem);

/// Bytes of workspace. `blocks`: the number of thread blocks of the launch.
std::size_t skip_bytes(const FwdConfig& config, const Problem& problem, std::int64_t blocks);
/// `workspace`: skip_bytes() of workspace.
SkipParams skip_params(const Problem& problem, const Bindings& bindings, std::byte* workspace);

}  // namespace tessera::cuda
