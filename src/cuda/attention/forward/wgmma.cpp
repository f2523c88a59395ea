// SPDX-License-Identifier: Apache-2.0
// The implementation cuda.fwd_wgmma: the forward for SM90.
#include <algorithm>
#include <iterator>

#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/launch.h"
#include "cuda/attention/kv/tensor_map.h"
#include "cuda/attention/sparse/tile_mass.h"

namespace tessera::cuda {
namespace {

Support supports_config(const FwdConfig& c, const Target& target) {
  if (c.stages < 2 || c.stages > 4) return Support::no("stages is " + std::to_string(c.stages) + "; want 2 to 4");
  if (target.sm != 90 || c.loader != Loader::tma || c.dv_parts != 1 || c.d > 256) {
    return Support::no("wants SM90, keys by TMA and at most 256 columns");
  }
  if ((c.warps != 4 && c.warps != 8 && c.warps != 12) || c.tile_q != c.warps * 16) {
    return Support::no("wants tile_q of 64, 128 or 192 rows, 16 a warp");
  }
  const int most_keys = c.tests_elements() ? 128 : 256;
  if (c.tile_kv > most_keys) return Support::no("wants at most " + std::to_string(most_keys) + " keys a tile");
  if (c.keeps_rests()) return Support::no("wants outputs of 16 bits for dropout");
  // The registers of a thread must hold scores, outputs and probabilities (forward/wgmma.cuh).
  const int registers = c.tile_kv / 2 + c.output_tiles() * 4 + c.tile_kv * bytes_of(c.type) / 8;
  const int most = c.warps == 12 ? 132 : 192;
  if (registers > most) {
    return Support::no("needs " + std::to_string(registers) +
                       " registers a thread for scores, output and probabilities; want at most " +
                       std::to_string(most));
  }
  if (c.warps == 4 && std::max(c.d, c.dv) > 128) {  // two blocks a multiprocessor leave each thread too few registers
    return Support::no("wants tile_q of 128 rows or more for more than 128 columns");
  }
  constexpr int widths[] = {32, 64, 80, 96, 128, 160, 192, 256};  // ptx/wgmma.cuh
  if (std::ranges::find(widths, c.tile_kv) == std::end(widths)) {
    return Support::no("wants 32, 64, 80, 96, 128, 160, 192 or 256 keys a tile");
  }
  if (c.multiplies_bytes() && c.tile_kv % 32 != 0) return Support::no("wants multiples of 32 keys a tile of 8 bits");
  return Support::yes();
}

// Whether TMA boxes of pages begin at multiples of 128 bytes of shared memory.
Support supports_pages(const FwdConfig& c, const KvSource& source) {
  const bool short_rows = c.panel_bytes() == 64;  // tile/swizzle.cuh
  if (!short_rows || box_rows(c, source) % 2 == 0) return Support::yes();
  return Support::no("page_size is " + std::to_string(source.page_size) + "; wants even ones for these head dims");
}

// Whether the kernel is faster than mma.sync (docs/experiments/gpu-forward-wgmma.md). With 8 bits the only other kernel
// is the one for few rows (attention/decode).
Support is_faster(const FwdConfig& config, const Problem& problem) {
  if (config.eight_bits && config.tiles == Tiles::list) return Support::yes();  // no other kernel has lists with 8 bits
  const bool narrow = std::max(config.d, config.dv) <= 64;
  const std::int64_t least_rows = narrow ? 33 : 65;
  const std::int64_t rows = problem.seqlen_q * packed_heads(problem);
  if (rows < least_rows) {
    return Support::no("is slower for " + std::to_string(rows) + " rows a sequence and head; wants " +
                       std::to_string(least_rows) + ", or to be wished for");
  }
  if (config.eight_bits) return Support::yes();
  if (config.dropout && std::max(config.d, config.dv) <= 32) {
    return Support::no("is slower for dropout at these head dims; wants to be wished for");
  }
  const int box = std::min(box_rows(config, problem.kv), problem.kv2 ? box_rows(config, *problem.kv2) : 256);
  const int least_box = config.whole_rows ? 8 : 16;
  if (box < least_box) {
    return Support::no("is slower where only " + std::to_string(box) + " keys lie together; wants " +
                       std::to_string(least_box) + ", or to be wished for");
  }
  return Support::yes();
}

Support exists(const FwdConfig& c, const Problem& problem, const Target& target, const Wishes& wishes) {
  if (const Support s = supports_config(c, target); !s) return s;
  if (const Support s = supports_pages(c, problem.kv); !s) return s;
  if (problem.kv2) {
    if (const Support s = supports_pages(c, *problem.kv2); !s) return s;
  }
  return wishes.implementation.empty() ? is_faster(c, problem) : Support::yes();
}

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (gathers_mass(problem)) return Support::no("gathers no masses");
  return supports_forward(problem, target, wishes, Products::wgmma, exists);
}

void plan(detail::PlanState& state) { plan_forward(state, Products::wgmma); }

}  // namespace

const Implementation kFwdWgmma = {
    {"cuda.fwd_wgmma", DeviceType::cuda, Operation::attention, supports, plan, Pass::forward}, run_forward};

}  // namespace tessera::cuda
