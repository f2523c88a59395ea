// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/kernel_source.h"

#include <string>

#include "cuda/jit/element.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"

namespace tessera::cuda {
namespace {

std::string packed_words(int heads_a_tile) {
  return heads_a_tile > 1 ? " heads_a_tile=" + std::to_string(heads_a_tile) : "";
}

}  // namespace

KernelSource bwd_source(const BwdConfig& c, const CallableSources& callables) {
  const bool queries = c.keeps_queries();
  const bool wgmma = c.products == Products::wgmma;
  KernelSource source;
  source.name =
      std::string("bwd_") + (wgmma ? "wgmma " : "mma ") +
      (queries       ? "dq "
       : c.adds_dq() ? "dqkv "
                     : "dkv ") +
      name_of(c.type) + " d=" + std::to_string(c.d) + ":" + std::to_string(c.dv) + " tile=" + std::to_string(c.tile_q) +
      "x" + std::to_string(c.tile_kv) +
      words_of(c, Words::beyond_defaults,
               {"of", "products", "type", "d", "dv", "tile_q", "tile_kv", "warps", "user_score", "user_mask"}) +
      callables.words();
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.user_texts = callables.files();
  const bool all = c.adds_dq();
  const std::string file = c.roles   ? "role_split"
                           : wgmma   ? "wgmma"
                           : queries ? "mma/row_pass"
                           : all     ? "mma/fused_pass"
                                     : "mma/key_pass";
  const std::string arguments = "<config, " + callables.type() + ">";
  const std::string side = queries ? "RowSide" : "KeySide";
  const std::string kernel = c.roles   ? "run_backward_by_roles<" + side + arguments + ">"
                             : wgmma   ? "run_backward<" + side + arguments + ">"
                             : queries ? "RowPass" + arguments + "::run"
                             : all     ? "run_fused_pass" + arguments
                                       : "run_key_pass" + arguments;
  std::vector<std::string> parameters = {"BwdParams params"};
  if (wgmma) parameters.emplace_back("BwdTensorMaps maps");
  source.text = to_string({.file = "cuda/attention/backward/" + file + ".cuh",
                           .definitions = configuration_line(c) + callables.definitions(),
                           .bounds = "config.block_threads(), config.blocks()",
                           .parameters = parameters,
                           .call = kernel + "(params, memory" + (wgmma ? ", &maps)" : ")"),
                           .has_memory = true});
  return source;
}

KernelSource row_values_source(const RowValuesConfig& c) {
  return {"bwd_row_values" + words_of(c, Words::all, {"heads_a_tile"}) + packed_words(c.heads_a_tile),
          to_string({.file = "cuda/attention/backward/row_values.cuh",
                     .definitions = configuration_line(c),
                     .bounds = "config.threads()",
                     .parameters = {c.residual ? "ResidualBwdParams params" : "BwdParams params"},
                     .call = "FindRowValues<config>::run(params)"})};
}

KernelSource mark_tiles_source() {
  return {"bwd_mark_tiles", to_string({.file = "cuda/attention/backward/lists/mark_tiles.cuh",
                                       .bounds = "MarkTiles::threads",
                                       .parameters = {"BwdParams params"},
                                       .call = "MarkTiles::run(params)"})};
}

KernelSource split_keys_source() {
  return {"bwd_split_keys", to_string({.file = "cuda/attention/backward/lists/split_keys.cuh",
                                       .bounds = "SplitKeys::threads",
                                       .parameters = {"BwdParams params"},
                                       .call = "SplitKeys::run(params)"})};
}

KernelSource query_sums_source(const QuerySumsConfig& c) {
  return {"bwd_query_sums" + words_of(c, Words::all, {"heads_a_tile"}) + packed_words(c.heads_a_tile),
          to_string({.file = "cuda/attention/backward/store_query_sums.cuh",
                     .definitions = configuration_line(c),
                     .bounds = "config.threads()",
                     .parameters = {"BwdParams params"},
                     .call = "StoreQuerySums<config>::run(params)"})};
}

KernelSource sum_sinks_source() {
  return {"bwd_sum_sinks", to_string({.file = "cuda/attention/backward/row_values.cuh",
                                      .bounds = "SumSinks::threads",
                                      .parameters = {"BwdParams params"},
                                      .call = "SumSinks::run(params)"})};
}

}  // namespace tessera::cuda
