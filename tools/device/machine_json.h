// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "device/machine.h"

namespace tessera::cli {

/// The "machine" object of a file of measurements.
nlohmann::json to_json(const Machine& machine);

}  // namespace tessera::cli
