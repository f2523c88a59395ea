// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/forward/kernel_source.h"

#include <string>

#include "cuda/attention/config_words.h"
#include "cuda/source/configuration_text.h"
#include "cuda/source/kernel_text.h"

namespace tessera::cuda {

KernelSource fwd_source(const FwdConfig& c, const CallableSources& callables) {
  const bool maps = c.uses_tma();
  const bool wgmma = c.products == Products::wgmma;
  const std::string name = wgmma ? "wgmma" : c.by_keys() ? "decode" : "mma";
  const std::string type = wgmma ? "FwdWgmma" : c.by_keys() ? "FwdDecode" : "FwdMma";
  KernelSource source;
  source.name = "fwd_" + name + words_of(c) + callables.words();
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.user_texts = callables.files();
  std::vector<std::string> parameters = {c.skip != Skip::none ? "SkipFwdParams params"
                                         : c.residual         ? "ResidualFwdParams params"
                                         : c.merges           ? "MergingFwdParams params"
                                                              : "FwdParams params"};
  if (maps) parameters.emplace_back("TensorMaps maps");
  if (c.has_descales()) parameters.emplace_back("DescaleParams descales");
  const std::string room = c.by_keys() ? "decode/" : "forward/";
  source.text = to_string({.file = "cuda/attention/" + room + name + ".cuh",
                           .definitions = configuration_line(c) + callables.definitions(),
                           .bounds = "config.block_threads(), config.blocks()",
                           .parameters = parameters,
                           .call = type + "<config, " + callables.type() + ">::run(" +
                                   (c.dv_parts > 1 ? "column_part<config>(params)" : "params") + ", memory, " +
                                   (maps ? "&maps" : "nullptr") + (c.has_descales() ? ", descales)" : ")"),
                           .has_memory = true});
  return source;
}

}  // namespace tessera::cuda
