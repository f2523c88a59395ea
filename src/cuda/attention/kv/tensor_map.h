// SPDX-License-Identifier: Apache-2.0
// Tensor maps of queries, keys and values, for TMA of SM90 and newer.
#pragma once

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Elements of a tensor, and of a box of it in one sequence: 64 or 32 columns.
struct MapSizes {
  std::int64_t columns, heads, rows, batch;
};
struct MapBox {
  int columns, heads, rows;
};

/// As (column, head, row, batch): boxes whose rows, with heads beside each other packed into them, are laid out as
/// SharedTile has its panels. Throws Error{unsupported} for a driver without tensor maps.
TensorMap tensor_map(const void* tensor, const Strides& strides, Element element, const MapSizes& sizes,
                     const MapBox& box);

/// Throws Error{unsupported} for strides that TMA cannot walk, in dimensions of more than one element; a stride of 0
/// between heads, sequences or pages is one of them for all. `instead`: what would do.
void check_map_strides(Slot slot, const Strides& strides, const MapSizes& sizes, const char* instead);

/// Rows of a source that a tile takes together and that lie together: as far as pages and granules of a list do.
int box_rows(const FwdConfig& config, const KvSource& source);

/// Whether boxes of small pages are to bring all columns of their rows: where that spares boxes, which wgmma alone can.
bool has_whole_rows(const FwdConfig& config, const Problem& problem);

/// Maps of the tensors in `params`, whose sources have their box_rows. Throws Error{unsupported} where the driver or
/// the strides of keys and values allow none; queries whose strides allow none are copied otherwise.
TensorMaps tensor_maps(const FwdConfig& config, const Problem& problem, const FwdParams& params, int packed_heads);

}  // namespace tessera::cuda
