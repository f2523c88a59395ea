// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cases/inputs/numbers.h"

namespace tessera {

using Floats = std::vector<float>;

inline Floats random_floats(std::uint64_t seed, std::int64_t count) {
  cases::RandomNumbers random(seed);
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = random.normal();
  return values;
}

}  // namespace tessera
