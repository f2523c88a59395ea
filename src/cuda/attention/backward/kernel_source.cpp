// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/kernel_source.h"

#include <string>

#include "cuda/jit/element.h"

namespace tessera::cuda {
namespace {

std::string element(Element e) { return std::string("Element::") + name_of(e); }

/// An initialiser for the compiler, and words for people.
struct Words {
  std::string fields;
  std::string words;

  void set(const char* name, const std::string& value) {
    fields += (fields.empty() ? "." : ", .") + std::string(name) + " = " + value;
  }
  void flag(const char* name, bool on) {
    if (!on) return;
    set(name, "true");
    words += std::string(" ") + name;
  }
};

Words words_of(const BwdConfig& c, const CallableSources& callables) {
  Words w;
  if (c.of == Gradients::keys) w.set("of", "Gradients::keys");
  w.set("type", element(c.type));
  w.set("gradient", element(c.gradient));
  w.words += std::string(" ") + name_of(c.type) + (c.gradient == c.type ? "" : " grad=fp32");
  w.set("d", std::to_string(c.d));
  w.set("dv", std::to_string(c.dv));
  w.words += " d=" + std::to_string(c.d) + ":" + std::to_string(c.dv);
  w.set("tile_q", std::to_string(c.tile_q));
  w.set("tile_kv", std::to_string(c.tile_kv));
  w.words += " tile=" + std::to_string(c.tile_q) + "x" + std::to_string(c.tile_kv);
  w.set("warps", std::to_string(c.warps));
  w.set("stages", std::to_string(c.stages));
  if (c.segments == 2) {
    w.set("segments", "2");
    w.words += " segments=2";
  }
  w.flag("apart", c.apart);
  w.flag("scale_first", c.scale_first);
  w.flag("compressed_causal", c.compressed_causal);
  w.flag("chunked", c.chunked);
  if (c.softcap == Softcap::rational) {
    w.set("softcap", "Softcap::rational");
    w.words += " softcap";
  }
  w.flag("alibi", c.alibi);
  w.flag("sink", c.sink);
  w.flag("dropout", c.dropout);
  if (c.user_mask) {
    w.set("user_mask", "true");
    w.words += callables.mask.word;
  }
  return w;
}

}  // namespace

KernelSource bwd_source(const BwdConfig& c, const CallableSources& callables) {
  const bool queries = c.of == Gradients::queries;
  const Words words = words_of(c, callables);
  KernelSource source;
  source.name = std::string("bwd_mma ") + (queries ? "dq" : "dkv") + words.words;
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.user_texts = callables.files();
  source.text =
      std::string("#include \"cuda/attention/backward/") + (queries ? "row_pass" : "key_pass") +
      ".cuh\"\n"
      "using namespace tessera::cuda;\n"
      "constexpr BwdConfig config{" +
      words.fields + "};\n" + callables.definitions() +
      "extern \"C\" __global__ void __launch_bounds__(config.threads(), config.blocks()) "
      "tessera_kernel(const __grid_constant__ BwdParams params) {\n"
      "  extern __shared__ __align__(1024) char memory[];\n"
      "  " +
      (queries ? "RowPass<config, " + callables.type() + ">::run" : "run_key_pass<config, " + callables.type() + ">") +
      "(params, memory);\n"
      "}\n";
  return source;
}

KernelSource row_values_source(const RowValuesConfig& c) {
  KernelSource source;
  source.name =
      std::string("bwd_row_values ") + name_of(c.type) + " dv=" + std::to_string(c.dv) + (c.sink ? " sink" : "");
  source.text =
      "#include \"cuda/attention/backward/row_values.cuh\"\n"
      "using namespace tessera::cuda;\n"
      "constexpr RowValuesConfig config{.type = " +
      element(c.type) + ", .dv = " + std::to_string(c.dv) + (c.sink ? ", .sink = true" : "") +
      "};\n"
      "extern \"C\" __global__ void __launch_bounds__(config.threads()) "
      "tessera_kernel(const __grid_constant__ BwdParams params) {\n"
      "  FindRowValues<config>::run(params);\n"
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
