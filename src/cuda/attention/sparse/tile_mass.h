// SPDX-License-Identifier: Apache-2.0
// The two kernels after a forward that writes masses of tiles or a next list. They compute the scores once more,
// because only now the rows' sums are known.
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
/// Whether these kernels support the problem.
Support supports_mass(const Problem& problem);
/// Bytes of workspace: for what the forward keeps of its rows (with splits the LSE, if the caller does not want it),
/// and for sums of row tiles.
std::size_t mass_bytes(const Problem& problem, std::int64_t splits);
/// `config`: the forward's.
std::vector<KernelSource> mass_sources(const FwdConfig& config, const Problem& problem);

/// Must precede the launch of the forward: gives it memory for what it keeps of its rows.
void keep_rows(FwdParams& params, const Problem& problem, std::int64_t splits, std::byte* workspace);
/// Must follow the forward. `params`: those of the forward, before they were changed for splits; `kernels`: those of
/// mass_sources().
void launch_mass(const FwdConfig& config, FwdParams params, DescaleParams descales, const Problem& problem,
                 const Bindings& bindings, std::int64_t splits, std::byte* workspace,
                 std::span<const Kernel* const> kernels, Stream stream);

}  // namespace tessera::cuda
