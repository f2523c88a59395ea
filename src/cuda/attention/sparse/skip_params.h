// SPDX-License-Identifier: Apache-2.0
// A skip state that a forward moves on: what its kernels are given, and what they need beside it.
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

/// Whether the state's rule and list are ones that kernels move on.
Support supports_skip(const Problem& problem);
/// The same of the tiles that were chosen: a row tile owns a row of the list, and a tile of keys lies in one of its.
Support supports_skip_tiles(const FwdConfig& config, const Problem& problem);

/// Of workspace. `blocks`: of the launch.
std::size_t skip_bytes(const FwdConfig& config, const Problem& problem, std::int64_t blocks);
/// `workspace`: skip_bytes() of it.
SkipParams skip_params(const Problem& problem, const Bindings& bindings, std::byte* workspace);

}  // namespace tessera::cuda
