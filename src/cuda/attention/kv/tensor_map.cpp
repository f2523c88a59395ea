// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/kv/tensor_map.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string>

#include "cuda/attention/params.h"
#include "cuda/driver/driver.h"
#include "cuda/jit/element.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

// Values of the driver's enumerations (cuda.h, CUDA 12.0).
constexpr int kNoInterleave = 0;
constexpr int kSwizzle64 = 2;
constexpr int kSwizzle128 = 3;
// How much a miss loads to L2. Boxes read 128 bytes of a row, one panel, at a time. With 256, misses of both panels
// would load both, which takes 7% of a decode step.
constexpr int kPromote128 = 2;
constexpr int kFillZeros = 0;

// The driver requires strides above 0. A dimension of one element has a stride that is not used, and a broadcast
// dimension has stride 0; kernels access element 0 of both.
std::uint64_t stride_bytes(i64 stride, std::int64_t size, Element element) {
  return static_cast<std::uint64_t>(stride > 0 && size > 1 ? stride * bytes_of(element) : kChunkBytes);
}
std::uint64_t extent(i64 stride, std::int64_t size) {
  return static_cast<std::uint64_t>(stride == 0 ? 1 : std::max<std::int64_t>(size, 1));
}

}  // namespace

TensorMap tensor_map(const void* tensor, const Strides& strides, Element element, const MapSizes& tensor_sizes,
                     const MapBox& box_of) {
  const auto encode = driver().tensor_map_encode_tiled;
  if (encode == nullptr) throw Error(ErrorCode::unsupported, "driver", "one without tensor maps", "CUDA 12 or newer");
  const auto [columns, heads, rows, batch] = tensor_sizes;
  const std::array<std::uint64_t, 4> sizes = {static_cast<std::uint64_t>(columns), extent(strides.head, heads),
                                              static_cast<std::uint64_t>(std::max<std::int64_t>(rows, 1)),
                                              extent(strides.batch, batch)};
  const std::array<std::uint64_t, 3> steps = {stride_bytes(strides.head, heads, element),
                                              stride_bytes(strides.row, rows, element),
                                              stride_bytes(strides.batch, batch, element)};
  const std::array<std::uint32_t, 4> box = {static_cast<std::uint32_t>(box_of.columns),
                                            static_cast<std::uint32_t>(box_of.heads),
                                            static_cast<std::uint32_t>(box_of.rows), 1};
  const std::array<std::uint32_t, 4> every = {1, 1, 1, 1};
  TensorMap map{};
  check(encode(&map, tensor_map_type(element), 4, const_cast<void*>(tensor), sizes.data(), steps.data(), box.data(),
               every.data(), kNoInterleave, box_of.columns * bytes_of(element) == 128 ? kSwizzle128 : kSwizzle64,
               kPromote128, kFillZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

void check_map_strides(Slot slot, const Strides& strides, const MapSizes& sizes, const char* instead) {
  const auto require = [&](i64 stride, std::int64_t size, i64 least, const char* between) {
    if (size <= 1 || stride >= least) return;
    throw Error(ErrorCode::unsupported, std::string(to_string(slot)),
                "a stride of " + std::to_string(stride) + " elements between " + between,
                "at least " + std::to_string(least) + ", or " + instead);
  };
  require(strides.row, sizes.rows, 1, "rows");
  require(strides.head, sizes.heads, 0, "heads");
  require(strides.batch, sizes.batch, 0, "sequences or pages");
}

namespace {

// Whether a TMA box can have 64 packed rows: they are whole queries, and the TMA allows the tensor's strides. A stride
// of 0 between sequences, or between heads that are not packed, means one for all.
bool has_query_boxes(const Problem& problem, Element element, const Strides& strides, std::int64_t rows,
                     int packed_heads) {
  const i64 most = (i64{1} << 40) / bytes_of(element);
  const auto walks = [most](i64 stride, std::int64_t size, i64 least) {
    return size <= 1 || (stride >= least && stride < most);
  };
  return 64 % packed_heads == 0 && walks(strides.row, rows, 1) && walks(strides.batch, problem.batch, 0) &&
         walks(strides.head, problem.heads_q, packed_heads > 1 ? 1 : 0);
}

}  // namespace

int box_rows(const FwdConfig& config, const KvSource& source) {
  const int together = config.tiles == Tiles::list ? config.granule : config.tile_kv;
  return is_paged(source) ? static_cast<int>(std::gcd<std::int64_t>(together, source.page_size)) : together;
}

// A box takes the TMA as much time as some 30 rows of a panel: docs/experiments/gpu-lists-and-pages.md.
bool has_whole_rows(const FwdConfig& config, const Problem& problem) {
  const auto panels = [](Element type, int columns, std::int64_t dim) {
    const bool whole = dim == columns && columns * bytes_of(type) % 128 == 0;
    return whole ? columns / columns_of_panel(type, columns) : 0;
  };
  const int of_k = panels(config.k_type(), config.d, problem.head_dim_qk);
  const int of_v = panels(config.v_type(), config.dv, problem.head_dim_v);
  const int rows = box_rows(config, problem.kv);
  return config.products == Products::wgmma && !config.has_descales() && config.source == Source::paged &&
         config.tiles == Tiles::range && config.segments == 1 && std::min(of_k, of_v) >= 1 &&
         std::max(of_k, of_v) >= 2 && rows % 8 == 0 && rows < 64;
}

namespace {

// Returns a map with the dimensions (column of a panel, row of eight, panel, eight rows, head and page). The stride of
// the last is the greatest common divisor of the strides of heads and pages; `steps` gets these in multiples of it.
TensorMap page_rows_map(const void* tensor, const Strides& strides, Element element, const MapSizes& sizes, int rows,
                        Slot slot, PageSteps& steps) {
  const auto encode = driver().tensor_map_encode_tiled;
  if (encode == nullptr) throw Error(ErrorCode::unsupported, "driver", "one without tensor maps", "CUDA 12 or newer");
  const auto columns = columns_of_panel(element, static_cast<int>(sizes.columns));
  const i64 head = sizes.heads > 1 ? strides.head : 0;
  const i64 page = sizes.batch > 1 ? strides.batch : 0;
  const i64 both = std::gcd(head, page);
  const i64 step = both != 0 ? both : kChunkBytes;
  const i64 count = (head / step) * (sizes.heads - 1) + (page / step) * std::max<i64>(sizes.batch - 1, 0) + 1;
  if (count > std::numeric_limits<int>::max()) {
    throw Error(
        ErrorCode::unsupported, std::string(to_string(slot)),
        "strides of " + std::to_string(head) + " and " + std::to_string(page) + " elements between heads and pages",
        "ones whose greatest common divisor is larger, or the wish implementation=cuda.fwd_mma");
  }
  steps = {static_cast<int>(head / step), static_cast<int>(page / step)};
  const std::array<std::uint64_t, 5> extents = {
      static_cast<std::uint64_t>(columns), 8, static_cast<std::uint64_t>(sizes.columns / columns),
      static_cast<std::uint64_t>(std::max<std::int64_t>(sizes.rows / 8, 1)), static_cast<std::uint64_t>(count)};
  const std::uint64_t row = stride_bytes(strides.row, sizes.rows, element);
  const std::array<std::uint64_t, 4> apart = {row, static_cast<std::uint64_t>(columns * bytes_of(element)), 8 * row,
                                              static_cast<std::uint64_t>(step * bytes_of(element))};
  const std::array<std::uint32_t, 5> box = {static_cast<std::uint32_t>(columns), 8,
                                            static_cast<std::uint32_t>(sizes.columns / columns),
                                            static_cast<std::uint32_t>(rows / 8), 1};
  const std::array<std::uint32_t, 5> every = {1, 1, 1, 1, 1};
  TensorMap map{};
  check(encode(&map, tensor_map_type(element), 5, const_cast<void*>(tensor), extents.data(), apart.data(), box.data(),
               every.data(), kNoInterleave, kSwizzle128, kPromote128, kFillZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

TensorMaps tensor_maps(const FwdConfig& config, const Problem& problem, const FwdParams& params, int packed_heads) {
  TensorMaps maps{};
  const std::int64_t queries = params.cu_seqlens_q != nullptr ? problem.total_q : problem.seqlen_q;
  if (config.products == Products::wgmma &&
      has_query_boxes(problem, config.q_type(), params.q_strides, queries, packed_heads)) {
    maps.queries = tensor_map(
        params.q, params.q_strides, config.q_type(), {params.d, problem.heads_q, queries, problem.batch},
        {.columns = columns_of_panel(config.q_type(), config.d), .heads = packed_heads, .rows = 64 / packed_heads});
    maps.has_queries = 1;
  }
  for (int i = 0; i < config.segments; ++i) {
    const KvParams& kv = params.kv[i];
    const bool paged = kv.page_table != nullptr;
    const std::int64_t rows = paged ? kv.page_size.value : kv.cu_seqlens != nullptr ? kv.total : kv.capacity;
    const std::int64_t batch = paged ? kv.pages : problem.batch;
    const MapSizes sizes{0, problem.heads_kv, rows, batch};
    check_map_strides(i == 0 ? Slot::k : Slot::k2, kv.k_strides, sizes, "the wish loader=cp_async");
    check_map_strides(i == 0 ? Slot::v : Slot::v2, kv.v_strides, sizes, "the wish loader=cp_async");
    if (config.whole_rows) {
      const auto map = [&](const void* tensor, const Strides& strides, Element type, int dim, Slot slot,
                           PageSteps& steps) {
        return page_rows_map(tensor != nullptr ? tensor : params.q, strides, type, {dim, problem.heads_kv, rows, batch},
                             kv.box_rows, slot, steps);
      };
      maps.keys[i] = map(kv.k, kv.k_strides, config.k_type(), config.d, Slot::k, maps.key_steps);
      maps.values[i] = map(kv.v, kv.v_strides, config.v_type(), config.dv, Slot::v, maps.value_steps);
      continue;
    }
    // The driver requires an address, even of an empty tensor.
    const auto map = [&](const void* tensor, const Strides& strides, Element type, std::int64_t dim, int padded) {
      return tensor_map(tensor != nullptr ? tensor : params.q, strides, type, {dim, problem.heads_kv, rows, batch},
                        {.columns = columns_of_panel(type, padded), .heads = 1, .rows = kv.box_rows});
    };
    maps.keys[i] = map(kv.k, kv.k_strides, config.k_type(), params.d, config.d);
    maps.values[i] = map(kv.v, kv.v_strides, config.v_type(), params.dv, config.dv);
  }
  return maps;
}

}  // namespace tessera::cuda
