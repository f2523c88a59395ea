// SPDX-License-Identifier: Apache-2.0
// The picture of the demo: one panel a head, one cell a tile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tile_choice.h"

namespace demo {

/// What one row of panels shows: a layer.
struct LayerPicture {
  std::string name;  // "layer 0"
  TileChoice choice;
  std::vector<float> mass;  // (heads, query blocks, key blocks), mean over the rows of the tile
};

/// An SVG document: kept tiles shaded by their probability mass, dropped tiles pale, tiles above the diagonal empty.
std::string draw(const std::vector<LayerPicture>& layers, const std::string& title, const std::string& subtitle);

}  // namespace demo
