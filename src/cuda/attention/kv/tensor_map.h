// SPDX-License-Identifier: Apache-2.0
// Tensor maps of queries, keys and values, for the TMA of SM90 and newer.
#pragma once

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The sizes, in elements, of a tensor and of a box. A box lies in one sequence and has the columns of one panel.
struct MapSizes {
  std::int64_t columns, heads, rows, batch;
};
struct MapBox {
  int columns, heads, rows;
};

/// Returns a map with the dimensions (column, head, row, batch). A box is loaded to shared memory as a panel of a
/// SharedTile; its heads are packed into the rows. Throws Error{unsupported} if the driver has no tensor maps.
TensorMap tensor_map(const void* tensor, const Strides& strides, Element element, const MapSizes& sizes,
                     const MapBox& box);

/// Throws Error{unsupported} for strides that the TMA does not allow in dimensions of more than one element. A stride
/// of 0 between heads, sequences or pages is allowed: it means one for all. `instead`: the alternative that the error
/// names.
void check_map_strides(Slot slot, const Strides& strides, const MapSizes& sizes, const char* instead);

/// The rows of a box: the largest number of a tile's rows that are adjacent in memory whatever the pages and the
/// granules of a list.
int box_rows(const FwdConfig& config, const KvSource& source);

/// Whether boxes of small pages load all columns of their rows. Only wgmma kernels do so, if it saves boxes.
bool has_whole_rows(const FwdConfig& config, const Problem& problem);

/// Returns maps of the tensors in `params`, whose sources have their box_rows. Throws Error{unsupported} if the driver,
/// or the strides of keys and values, do not allow them. If those of queries do not, the kernel copies queries without
/// a map.
TensorMaps tensor_maps(const FwdConfig& config, const Problem& problem, const FwdParams& params, int packed_heads);

}  // namespace tessera::cuda
