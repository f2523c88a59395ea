// SPDX-License-Identifier: Apache-2.0
// How many blocks share a multiprocessor, by their shared memory.
#pragma once

#include <cstddef>

#include "tessera/plan.h"

namespace tessera::cuda {

/// How many blocks of `bytes` bytes fit into the shared memory of a multiprocessor.
int blocks_that_fit(int bytes, const Target& target);
/// How many bytes a block of `bytes` bytes requests. A multiprocessor of the present device may have room for more
/// blocks than one of an emulated target. Then the request is larger, so that as few blocks share one here.
std::size_t bytes_to_ask_for(std::size_t bytes, const Target& target);

}  // namespace tessera::cuda
