// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/kernel_source.h"

#include <string>

#include "cuda/jit/element.h"
#include "cuda/source/configuration_text.h"

namespace tessera::cuda {
KernelSource bwd_source(const BwdConfig& c, const CallableSources& callables) {
  const bool queries = c.keeps_queries();
  const bool wgmma = c.products == Products::wgmma;
  KernelSource source;
  source.name = std::string("bwd_") + (wgmma ? "wgmma " : "mma ") +
                (queries            ? "dq "
                 : c.adds_queries() ? "dqkv "
                                    : "dkv ") +
                name_of(c.type) + " d=" + std::to_string(c.d) + ":" + std::to_string(c.dv) +
                " tile=" + std::to_string(c.tile_q) + "x" + std::to_string(c.tile_kv) +
                words_of(c, Words::beyond_defaults,
                         {"of", "products", "type", "d", "dv", "tile_q", "tile_kv", "warps", "stages", "user_mask"}) +
                callables.words();
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.user_texts = callables.files();
  const std::string file = wgmma ? "wgmma" : queries ? "row_pass" : "key_pass";
  const std::string arguments = "<config, " + callables.type() + ">";
  const std::string kernel = wgmma ? "BwdWgmma<" + std::string(queries ? "RowSide" : "KeySide") + arguments + ">::run"
                             : queries ? "RowPass" + arguments + "::run"
                                       : "run_key_pass" + arguments;
  source.text = "#include \"cuda/attention/backward/" + file +
                ".cuh\"\n"
                "using namespace tessera::cuda;\n" +
                configuration_line(c) + callables.definitions() +
                "extern \"C\" __global__ void __launch_bounds__(config.block_threads(), config.blocks()) "
                "tessera_kernel(const __grid_constant__ BwdParams params" +
                (wgmma ? ", const __grid_constant__ BwdTensorMaps maps" : "") +
                ") {\n"
                "  extern __shared__ __align__(1024) char memory[];\n"
                "  " +
                kernel + "(params, memory" + (wgmma ? ", &maps" : "") +
                ");\n"
                "}\n";
  return source;
}

KernelSource row_values_source(const RowValuesConfig& c) {
  KernelSource source;
  source.name = "bwd_row_values" + words_of(c, Words::all);
  source.text =
      "#include \"cuda/attention/backward/row_values.cuh\"\n"
      "using namespace tessera::cuda;\n" +
      configuration_line(c) +
      "extern \"C\" __global__ void __launch_bounds__(config.threads()) "
      "tessera_kernel(const __grid_constant__ BwdParams params) {\n"
      "  FindRowValues<config>::run(params);\n"
      "}\n";
  return source;
}

KernelSource query_sums_source(const QuerySumsConfig& c) {
  KernelSource source;
  source.name = "bwd_query_sums" + words_of(c, Words::all);
  source.text =
      "#include \"cuda/attention/backward/store_query_sums.cuh\"\n"
      "using namespace tessera::cuda;\n" +
      configuration_line(c) +
      "extern \"C\" __global__ void __launch_bounds__(config.threads()) "
      "tessera_kernel(const __grid_constant__ BwdParams params) {\n"
      "  StoreQuerySums<config>::run(params);\n"
      "}\n";
  return source;
}

KernelSource sum_sinks_source() {
  return {"bwd_sum_sinks",
          "#include \"cuda/attention/backward/row_values.cuh\"\n"
          "using namespace tessera::cuda;\n"
          "extern \"C\" __global__ void __launch_bounds__(SumSinks::threads) "
          "tessera_kernel(const __grid_constant__ BwdParams params) {\n"
          "  SumSinks::run(params);\n"
          "}\n",
          0};
}

}  // namespace tessera::cuda
