// SPDX-License-Identifier: Apache-2.0
// What policies require of the work of a block, whatever its kernel.
#pragma once

#include "cuda/attention/tiles/tile_range.cuh"

namespace tessera::cuda {

/// A block's packed rows, its sequence, and where the keys of a tile are: TileRange or TileList.
template <class Work>
concept TileWork = requires(const Work& work, const KvTile& tile, int column) {
  Block{work.block};
  Sequence{work.sequence};
  int{work.tiles.key(tile, column)};
  int{work.tiles.moved(tile, column)};
  bool{work.tiles.waives(tile, column)};
};

/// The same for a block that knows which of its tiles may hide keys.
template <class Work>
concept HidingWork = TileWork<Work> && requires(const Work& work, const KvTile& tile, int i) {
  int{work.tiles.count()};
  KvTile{work.tiles.at(i)};
  bool{work.may_hide(tile)};
  int{work.keys_of(tile)};
};

}  // namespace tessera::cuda
