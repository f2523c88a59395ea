// SPDX-License-Identifier: Apache-2.0
// The two kernels behind a forward that writes masses of tiles or a next list: a second look at the scores, with their
// sums known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/implementations.h"
#include "shared/config.h"
#include "shared/params.h"

namespace tessera::cuda {

/// Whether the problem asks for masses or a next list.
bool gathers_mass(const Problem& problem);
/// What keeps it from them, if anything.
Support supports_mass(const Problem& problem);
/// Bytes of the workspace: what the forward keeps of its rows (its LSE in splits, where the caller wants none), and
/// sums of row tiles.
std::size_t mass_bytes(const Problem& problem, std::int64_t splits);
/// `config`: the forward's.
std::vector<KernelSource> mass_sources(const FwdConfig& config, const Problem& problem);

/// Before the forward is launched: gives it memory for what the masses need of its rows.
void keep_rows(FwdParams& params, const Problem& problem, std::int64_t splits, std::byte* workspace);
/// Behind the forward. `params`: as the forward had them before splits; `kernels`: of mass_sources.
void launch_mass(const FwdConfig& config, FwdParams params, DescaleParams descales, const Problem& problem,
                 const Bindings& bindings, std::int64_t splits, std::byte* workspace,
                 std::span<const Kernel* const> kernels, Stream stream);

}  // namespace tessera::cuda
