// SPDX-License-Identifier: Apache-2.0
// Shared memory of the block that runs, and the GPU's memory, which is the process's own.
#pragma once

#include <cstddef>
#include <string>

#include "kernel/calls.h"

namespace emulator {

/// Gives blocks of a launch so much dynamic shared memory; behind it nothing can be touched, from the next page on.
void begin_shared(u32 bytes);
/// Makes NaN of all of it.
void poison_shared();
/// "" or that somebody wrote behind its end or that of an allocation.
std::string check_ends();
void end_shared();

/// Memory that ends where nothing is mapped, filled with NaN; nullptr when there is none.
void* allocate(std::size_t bytes);
void release(void* begin);
/// What an address is next to, in words.
std::string place_of(const void* address);

}  // namespace emulator
