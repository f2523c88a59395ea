// SPDX-License-Identifier: Apache-2.0
// Tensor maps of queries, keys and values, for TMA of SM90 and newer.
#pragma once

#include <cstdint>

#include "shared/params.h"

namespace tessera::cuda {

/// Elements of a tensor, and of a box of it in one sequence: 64 or 32 columns.
struct MapSizes {
  std::int64_t columns, heads, rows, batch;
};
struct MapBox {
  int columns, heads, rows;
};

/// Of 16-bit elements, as (column, head, row, batch): boxes whose rows, with heads beside each other packed into them,
/// are laid out as SharedTile has its panels. Throws Error{unsupported} where the driver or the strides allow none.
TensorMap tensor_map(const void* tensor, const Strides& strides, const MapSizes& tensor_sizes, const MapBox& box_of);

}  // namespace tessera::cuda
