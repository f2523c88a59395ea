// SPDX-License-Identifier: Apache-2.0
// What is legal and rare: numbers at the ends of their ranges, keys with values that are not finite, strides that are
// 0, negative or odd.
#pragma once

#include "cases/inputs/numbers.h"
#include "cases/line/case.h"

namespace tessera::cases {

/// Strides for any operation. With `gpu`, those that a GPU cannot address are left out.
Strides random_strides(RandomNumbers& random, bool gpu);

/// Changes a few of the numbers of an attention that has all its features.
void make_extreme(Case& one, RandomNumbers& random, bool gpu);

}  // namespace tessera::cases
