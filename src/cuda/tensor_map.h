// SPDX-License-Identifier: Apache-2.0
// Tensor maps of keys and values, for the copy engine of SM90 and newer.
#pragma once

#include <cstdint>

#include "shared/params.h"

namespace tessera::cuda {

/// Of 16-bit elements, as (column, row, head, batch): boxes of `box_rows` rows and `box_columns` columns, 64 or 32,
/// laid out as SharedTile has its panels. Throws Error{unsupported} where the driver or the strides allow none.
TensorMap tensor_map(const void* tensor, const Strides& strides, std::int64_t columns, std::int64_t rows,
                     std::int64_t heads, std::int64_t batch, int box_rows, int box_columns);

}  // namespace tessera::cuda
