// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/kernel_source.h"

#include <string>

#include "cuda/attention/config_words.h"
#include "cuda/source/configuration_text.h"

namespace tessera::cuda {

KernelSource fwd_source(const FwdConfig& c, const CallableSources& callables) {
  const bool maps = c.uses_tma();
  const bool wgmma = c.products == Products::wgmma;
  const std::string products = wgmma ? "wgmma" : "mma";
  KernelSource source;
  source.name = "fwd_" + products + words_of(c) + callables.words();
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.user_texts = callables.files();
  source.text = "#include \"cuda/attention/forward/" + products +
                ".cuh\"\n"
                "using namespace tessera::cuda;\n" +
                configuration_line(c) + callables.definitions() +
                "extern \"C\" __global__ void __launch_bounds__(config.block_threads(), config.blocks()) "
                "tessera_kernel(const __grid_constant__ FwdParams params" +
                (maps ? ", const __grid_constant__ TensorMaps maps" : "") +
                ") {\n"
                "  extern __shared__ __align__(1024) char memory[];\n"
                "  " +
                (wgmma ? "FwdWgmma" : "FwdMma") + "<config, " + callables.type() + ">::run(" +
                (c.dv_parts > 1 ? "column_part<config>(params)" : "params") + ", memory, " +
                (maps ? "&maps" : "nullptr") +
                ");\n"
                "}\n";
  return source;
}

}  // namespace tessera::cuda
