// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/backward/tensor_maps.h"

#include "cuda/attention/kv/tensor_map.h"

namespace tessera::cuda {

BwdTensorMaps tensor_maps(const BwdConfig& config, const Problem& problem, const BwdParams& params) {
  BwdTensorMaps maps{};
  const FwdParams& p = params.forward;
  const char* instead = "the wish implementation=cuda.bwd_mma";
  const auto box = [&](int padded, int rows) {
    return MapBox{.columns = columns_of_panel(config.type, padded), .heads = 1, .rows = rows};
  };
  const auto map = [&](Slot slot, const void* tensor, const Strides& strides, const MapSizes& sizes, int padded,
                       int rows) {
    // The driver requires an address and strides for an empty tensor too.
    if (sizes.rows == 0) return tensor_map(p.q, {}, config.type, sizes, box(padded, rows));
    check_map_strides(slot, strides, sizes, instead);
    return tensor_map(tensor, strides, config.type, sizes, box(padded, rows));
  };
  const std::int64_t queries = p.cu_seqlens_q != nullptr ? problem.total_q : problem.seqlen_q;
  maps.q = map(Slot::q, p.q, p.q_strides, {p.d, problem.heads_q, queries, problem.batch}, config.d, config.tile_q);
  maps.dout = map(Slot::dout, params.dout, params.dout_strides, {p.dv, problem.heads_q, queries, problem.batch},
                  config.dv, config.tile_q);
  for (int i = 0; i < config.segments; ++i) {
    const KvParams& kv = p.kv[i];
    const std::int64_t keys = kv.cu_seqlens != nullptr ? kv.total : kv.capacity;
    maps.keys[i] = map(i == 0 ? Slot::k : Slot::k2, kv.k, kv.k_strides, {p.d, problem.heads_kv, keys, problem.batch},
                       config.d, config.tile_kv);
    maps.values[i] = map(i == 0 ? Slot::v : Slot::v2, kv.v, kv.v_strides, {p.dv, problem.heads_kv, keys, problem.batch},
                         config.dv, config.tile_kv);
  }
  return maps;
}

}  // namespace tessera::cuda
