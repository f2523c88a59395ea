// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/config_words.h"

#include "cuda/jit/element.h"
#include "cuda/source/configuration_text.h"

namespace tessera::cuda {

std::string words_of(const FwdConfig& c) {
  const std::string output = c.output == c.type ? "" : std::string(" output=") + name_of(c.output);
  const std::string parts = c.dv_parts > 1 ? std::to_string(c.dv_parts) + "x" : "";
  return std::string(" ") + name_of(c.type) + output + " d=" + std::to_string(c.d) + ":" + parts +
         std::to_string(c.dv) + " tile=" + std::to_string(c.tile_q) + "x" + std::to_string(c.tile_kv) +
         " stages=" + std::to_string(c.stages) +
         words_of(c, Words::beyond_defaults,
                  {"type", "output", "d", "dv", "dv_parts", "tile_q", "tile_kv", "stages", "products", "user_score",
                   "user_mask"});
}

}  // namespace tessera::cuda
