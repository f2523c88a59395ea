// SPDX-License-Identifier: Apache-2.0
#include "cuda/fwd_source.h"

#include <string>

#include "cuda/element.h"

namespace tessera::cuda {
namespace {

/// The fields that are not as FwdConfig has them by default, as an initialiser for the compiler and as words for
/// people. In the order of the struct.
class Fields {
 public:
  void number(const char* name, int value) {
    set(name, std::to_string(value));
    words_ += std::string(" ") + name + "=" + std::to_string(value);
  }
  void flag(const char* name, bool on) {
    if (!on) return;
    set(name, "true");
    words_ += std::string(" ") + name;
  }
  /// `words`: for people; the value is `Type::value`.
  void option(const char* name, const char* value, const std::string& words) {
    set(name, value);
    words_ += words;
  }
  /// For the compiler alone.
  void set(const char* name, const std::string& value) {
    initialiser_ += (initialiser_.empty() ? "." : ", .") + std::string(name) + " = " + value;
  }
  void word(const std::string& word) { words_ += " " + word; }

  [[nodiscard]] const std::string& initialiser() const { return initialiser_; }
  [[nodiscard]] const std::string& words() const { return words_; }

 private:
  std::string initialiser_;
  std::string words_;
};

void shape_fields(Fields& fields, const FwdConfig& c) {
  const std::string element = "Element::";
  fields.option("type", (element + name_of(c.type)).c_str(), std::string(" ") + name_of(c.type));
  fields.option("output", (element + name_of(c.output)).c_str(), c.output == c.type ? "" : " out=fp32");
  fields.set("d", std::to_string(c.d));
  fields.set("dv", std::to_string(c.dv));
  if (c.dv_parts > 1) fields.set("dv_parts", std::to_string(c.dv_parts));
  fields.word("d=" + std::to_string(c.d) + ":" + (c.dv_parts > 1 ? std::to_string(c.dv_parts) + "x" : "") +
              std::to_string(c.dv));
  fields.set("tile_m", std::to_string(c.tile_m));
  fields.set("tile_n", std::to_string(c.tile_n));
  fields.word("tile=" + std::to_string(c.tile_m) + "x" + std::to_string(c.tile_n));
  if (c.warps != FwdConfig{}.warps) fields.number("warps", c.warps);
  fields.number("stages", c.stages);
  if (!c.turns) fields.option("turns", "false", " at will");
  if (c.q_kept > 0) fields.number("q_kept", c.q_kept);
}

Fields fields_of(const FwdConfig& c, const CallableSources& callables) {
  Fields fields;
  shape_fields(fields, c);
  if (c.source == Source::paged) fields.option("source", "Source::paged", " paged");
  if (c.source == Source::mixed) fields.option("source", "Source::mixed", " mixed");
  if (c.loader == Loader::tma) fields.option("loader", "Loader::tma", " tma");
  if (c.loader == Loader::tma_warp) fields.option("loader", "Loader::tma_warp", " tma_warp");
  if (c.products == Products::wgmma) fields.set("products", "Products::wgmma");
  if (c.tiles == Tiles::list) fields.option("tiles", "Tiles::list", " list");
  if (c.segments == 2) fields.number("segments", c.segments);
  if (c.tiles == Tiles::list) fields.number("run", c.run);
  fields.flag("list_elements", c.list_elements);
  fields.flag("list_waives", c.list_waives);
  fields.flag("varlen", c.varlen);
  fields.flag("trusts", c.trusts);
  fields.flag("scale_first", c.scale_first);
  fields.flag("affine", c.affine);
  fields.flag("chunked", c.chunked);
  if (c.softcap == Softcap::exponential) fields.option("softcap", "Softcap::exponential", " softcap");
  if (c.softcap == Softcap::rational) fields.option("softcap", "Softcap::rational", " softcap=rational");
  fields.flag("alibi", c.alibi);
  fields.flag("dropout", c.dropout);
  fields.flag("rounded_sums", c.rounded_sums);
  if (c.user_score) fields.option("user_score", "true", callables.score.word);
  if (c.user_mask) fields.option("user_mask", "true", callables.mask.word);
  return fields;
}

}  // namespace

std::string configuration_line(const FwdConfig& config) {
  return "constexpr FwdConfig config{" + fields_of(config, {}).initialiser() + "};\n";
}

std::string configuration_words(const FwdConfig& config, const CallableSources& callables) {
  return fields_of(config, callables).words();
}

KernelSource fwd_source(const FwdConfig& c, const CallableSources& callables) {
  const bool maps = c.by_copy_engine();
  const bool wgmma = c.products == Products::wgmma;
  const std::string file = wgmma ? "fwd_wgmma" : "fwd_mma";
  KernelSource source;
  source.name = file + configuration_words(c, callables);
  source.shared_bytes = static_cast<std::size_t>(c.smem_bytes());
  source.user_texts = callables.files();
  source.text = "#include \"cuda/kernels/" + file +
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
