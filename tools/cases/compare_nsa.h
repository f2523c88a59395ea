// SPDX-License-Identifier: Apache-2.0
// Judges the lists of nsa_select: blocks whose scores lie as near as rounding brings them may stand for each other.
#pragma once

#include <string>

#include "cpu/reference/reference.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cases {

/// "" or what is wrong. `allowed`: how far a score may be off. Of each list Result::next_mass has the scores of all
/// blocks, infinite for a forced one, NaN for one that may not be taken.
std::string compare_selected(const Bindings& got, const reference::Result& oracle, double allowed);
/// Likewise of the lists of blocks of compressed keys, by Result::compressed_scores.
std::string compare_compressed(const Bindings& got, const reference::Result& oracle, double allowed);

}  // namespace tessera::cases
