// SPDX-License-Identifier: Apache-2.0
// How many blocks share a multiprocessor, by their shared memory.
#pragma once

#include <cstddef>

#include "tessera/plan.h"

namespace tessera::cuda {

/// Blocks of so many bytes that the shared memory of a multiprocessor has room for.
int blocks_that_fit(int bytes, const Target& target);
/// What a block of so many bytes asks for: on an emulated chip, whose multiprocessors may have room for fewer blocks
/// than the present one's, so much more that no more of them share a multiprocessor here.
std::size_t bytes_to_ask_for(std::size_t bytes, const Target& target);

}  // namespace tessera::cuda
