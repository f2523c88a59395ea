// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup of the backward by wgmma: one warp issues the TMA copies of tiles, one describes each tile and
// loads its row values, and two search tiles that hide elements for values that are not finite. With adds_dq() one of
// these two adds dQ by TMA instead.
#pragma once

#include "cuda/attention/backward/non_finite_rows.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzle.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

template <class Side>
struct BwdProducer {
  static constexpr BwdConfig B = Side::B;
  using OwnQk = SharedTile<B.type, B.own_rows(), B.d>;
  using OwnOv = SharedTile<B.type, B.own_rows(), B.dv>;
  using StreamQk = SharedTile<B.type, B.stream_rows(), B.d>;
  using StreamOv = SharedTile<B.type, B.stream_rows(), B.dv>;
  using NonFinite = NonFiniteRows<B.type, B.stream_rows()>;
  using OwnNonFinite = NonFiniteRows<B.type, B.own_rows()>;
  using GradientTile = SharedTile<B.type, B.own_rows(), B.stream_rows()>;  // dS, from which dQ is computed
  static constexpr int groups = B.warps / 4;                               // consumer warpgroups
  static constexpr int own_threads = B.roles ? 128 : B.threads();          // threads that share the block's own rows
  static_assert(groups == 2 || (groups == 1 && B.has_list() && !B.adds_dq()));
  /// A consumer warpgroup computes dQ of 64 rows by query_columns columns of a tile. At 96 columns the second one
  /// stores only last_query_columns of them.
  static constexpr int query_columns = B.stream_rows() >= 128 ? B.d : sum_columns(B.d);
  static constexpr int last_query_columns = B.stream_rows() >= 128 ? B.d : B.d - sum_columns(B.d);
  static constexpr u32 query_part_bytes = kSumRows * query_columns * 4;  // of the first group
  // Registers that setmaxnreg redistributes. At launch each thread has 168 in a block of three warpgroups (504
  // together), and 128 in one of two (256), because two such blocks share a multiprocessor.
  static constexpr bool much_to_find = B.segments == 2 || (!B.adds_dq() && (B.compressed_causal || B.chunked));
  static constexpr int producer_registers = much_to_find                ? (groups == 1 ? 32 : 56)
                                            : B.has_list() && B.d > 192 ? 40
                                                                        : 24;
  static constexpr int consumer_registers = ((groups == 1 ? 256 : 504) - producer_registers) / groups / 8 * 8;

  // The ring of listed tiles. An entry is overwritten 4 · stages tiles later. The warp that adds dQ, which is about one
  // tile late, has read it long before.
  static constexpr int kListed = 4 * B.stages;

  /// The shared memory in front of the tiles.
  struct Memory {
    typename Side::Work work;
    typename Side::Tile tiles[B.stages];
    NonFinite non_finite[B.stages];
    bool replaced[B.stages];  // whether a row of the tile is not finite
    OwnNonFinite own_non_finite;
    bool own_replaced;   // whether a row of the block's own tile of K is not finite
    bool is_last_part;   // whether this part is the last of its tile to end
    u64 own_qk, own_ov;  // mbarriers of one phase: the block's own tiles have arrived
    u64 own_checks;      // likewise: with adds_dq(), the consumers have set own_replaced
    u64 stream[2 * B.stages];
    u64 checks[2 * B.stages];
    u64 query_sums[2 * groups];
    typename Side::Place listed[B.has_list() ? kListed : 1];  // listed tiles, from the copying warp to the others
    u64 walked[B.has_list() ? B.stages : 1];
    u64 ov_stream[2];  // with single_ov: as `stream`, for the one stage of V
  };
  static_assert(sizeof(Memory) <= FwdConfig::kWorkBytes);

  const FwdParams& p;
  Memory& memory;
  const Side side;
  const u32 tiles;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned; `index`: number of the block's work (Side::find).
  /// Kernel: derived from this class, without members of its own; its compute() is what consumers run.
  template <class Kernel>
  static __device__ __forceinline__ void run(const BwdParams& params, char* memory, const BwdTensorMaps* maps,
                                             int index) {
    typename Side::Work work{};
    if (!Side::find(params, index, work)) return;
    auto& shared = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) shared.work = work;
    const Kernel kernel{
        {params.forward, shared, {params, maps, shared.work}, ptx::shared_address(memory) + FwdConfig::kWorkBytes}};
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();
    if (kernel.warp() < B.warps) {
      ptx::setmaxnreg_inc<consumer_registers>();
      kernel.compute();
    } else {
      ptx::setmaxnreg_dec<producer_registers>();
      kernel.produce();
    }
  }

  __device__ __forceinline__ int warp() const { return ptx::uniform(thread / 32); }
  // The thread's number is read again rather than kept, since registers are short. With splits_rows ptxas would keep
  // and spill a copy all the same, unless %tid.x itself is read again.
  static __device__ __forceinline__ int thread_again() {
    const int thread = B.splits_rows ? ptx::thread_index() : ptx::afresh(static_cast<int>(threadIdx.x));
    __builtin_assume(thread >= 0);  // otherwise remainders take three more instructions
    return thread;
  }
  static __device__ __forceinline__ int lane_again() { return thread_again() % 32; }
  static __device__ __forceinline__ int warp_row() { return thread_again() % own_threads / 32 * 16; }
  __device__ __forceinline__ u32 own_qk() const { return tiles; }
  __device__ __forceinline__ u32 own_ov() const { return tiles + OwnQk::bytes; }
  __device__ __forceinline__ u32 gradients_at(int i) const {
    return own_ov() + OwnOv::bytes + i % 2 * GradientTile::bytes;
  }
  /// Address of P of a tile: 16 bytes for each thread and group of eight columns.
  __device__ __forceinline__ u32 probabilities_at(int i) const {
    return own_ov() + OwnOv::bytes + i % 2 * (B.exchange_bytes() / 2);
  }
  /// Address of a group's part of dQ of a tile.
  __device__ __forceinline__ u32 query_sums_at(int group) const {
    return own_ov() + OwnOv::bytes + B.exchange_bytes() + group * query_part_bytes;
  }
  static constexpr u32 stage_bytes = StreamQk::bytes + (B.single_ov ? 0 : StreamOv::bytes);
  __device__ __forceinline__ u32 qk_at(int i) const {
    return own_ov() + OwnOv::bytes + B.exchange_bytes() + B.query_sum_bytes() +
           static_cast<u32>(i) % B.stages * stage_bytes;
  }
  /// Address of V or dO of the tile whose K or Q is at `qk`.
  __device__ __forceinline__ u32 ov_at(u32 qk) const {
    return B.single_ov ? qk_at(0) + B.stages * stage_bytes : qk + StreamQk::bytes;
  }
  /// Address of the LSE, δ and weights of a streamed tile of rows, behind all tiles.
  __device__ __forceinline__ u32 values_at(int i) const {
    const u32 behind = qk_at(0) + B.stream_bytes();
    return behind + static_cast<u32>(i) % B.value_stages() * B.value_bytes();
  }
  __device__ __forceinline__ Ring<B.stages> stream() const { return {ptx::shared_address(memory.stream)}; }
  /// The ring of V alone, with single_ov.
  __device__ __forceinline__ Ring<1> ov_stream() const { return {ptx::shared_address(memory.ov_stream)}; }
  __device__ __forceinline__ Ring<B.stages> checks() const { return {ptx::shared_address(memory.checks)}; }
  /// Each group has a buffer, so that use i · groups + g is that of group g for tile i.
  __device__ __forceinline__ Ring<groups> query_sums() const { return {ptx::shared_address(memory.query_sums)}; }
  __device__ __forceinline__ void await_own_qk() const { ptx::mbarrier_wait(ptx::shared_address(&memory.own_qk), 0); }
  __device__ __forceinline__ void await_own_ov() const { ptx::mbarrier_wait(ptx::shared_address(&memory.own_ov), 0); }

  /// By one thread, before a barrier of the block.
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(ptx::shared_address(&memory.own_qk), 1);
    ptx::mbarrier_init(ptx::shared_address(&memory.own_ov), 1);
    if constexpr (B.adds_dq()) {
      ptx::mbarrier_init(ptx::shared_address(&memory.own_checks), 1);
      memory.own_non_finite = {};
      memory.own_replaced = false;
    }
    stream().init(2, B.warps + 1);  // filled by the copying and the describing warp; read by consumers and a checker
    if constexpr (B.single_ov) ov_stream().init(1, B.warps);
    checks().init(1, 1);
    if constexpr (B.adds_dq()) query_sums().init(4, 1);
    if constexpr (B.has_list()) {
      for (int stage = 0; stage < B.stages; ++stage) ptx::mbarrier_init(walked_at(stage), 1);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ void produce() const {
    const int role = warp() - B.warps;
    const int count = side.count();
    if (role == 0) {
      if (B.has_list() || lane == 0) copy(count);
    } else if (role == 1) {
      describe(count);
    } else if (B.adds_dq() && role == 3) {
      if constexpr (B.adds_dq()) {
        if (lane == 0) add_dq(count);
      }
    } else {
      check(role - 2, count);
    }
  }

  /// Returns the rows of a tile that are not finite, or null if all are; for use after the wait for the tile's check.
  __device__ __forceinline__ const NonFinite* non_finite(int i) const {
    return memory.replaced[i % B.stages] ? &memory.non_finite[i % B.stages] : nullptr;
  }

 private:
  static constexpr int kCheckers = B.adds_dq() ? 1 : 2;  // warps

  __device__ __forceinline__ void copy(int count) const {
    if (count == 0) return;
    const bool asks = !B.has_list() || lane == 0;  // a warp walks over a list
    if (asks) {
      const u32 copied = ptx::shared_address(&memory.own_qk);
      ptx::mbarrier_arrive_expecting(copied, OwnQk::bytes);
      side.template copy_own_qk<OwnQk>(own_qk(), copied);
    }
    auto walk = side.walk();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const auto tile = side.next_tile(walk, i, lane);
      if (!asks) continue;
      stream().acquire(i, stage_bytes);
      if constexpr (B.has_list()) {
        memory.listed[i % kListed] = tile;
        ptx::mbarrier_arrive(walked_at(i));
      }
      if constexpr (B.single_ov) {
        side.template copy_qk<StreamQk>(tile, qk_at(i), stream().full(i));
        if (i == 0) copy_own_ov();  // S needs the tile first, dP follows
        ov_stream().acquire(i, StreamOv::bytes);
        side.template copy_ov<StreamOv>(tile, ov_at(qk_at(i)), ov_stream().full(i));
      } else {
        side.template copy<StreamQk, StreamOv>(tile, qk_at(i), ov_at(qk_at(i)), stream().full(i));
        if (i == 0) copy_own_ov();
      }
    }
  }

  __device__ __forceinline__ void copy_own_ov() const {
    const u32 copied = ptx::shared_address(&memory.own_ov);
    ptx::mbarrier_arrive_expecting(copied, OwnOv::bytes);
    side.template copy_own_ov<OwnOv>(own_ov(), copied);
  }

  __device__ __forceinline__ u32 walked_at(int i) const {
    return ptx::shared_address(&memory.walked[static_cast<u32>(i) % B.stages]);
  }
  // Only the copying warp walks over a list, because registers are short.
  __device__ __forceinline__ typename Side::Place tile_of(int i) const {
    if constexpr (B.has_list()) {
      ptx::mbarrier_wait(walked_at(i), Ring<B.stages>::parity(i));
      return memory.listed[i % kListed];
    }
    return side.place(i);
  }
  __device__ __forceinline__ void describe(int count) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const auto tile = side.describe(tile_of(i));
      const auto values = side.load_row_values(tile, lane);  // these loads overlap the last reads of the stage
      // Waits until the buffer of row values is free: tile i − value_stages() used it last, which is a later tile than
      // i − stages if there are fewer value stages than stages.
      stream().wait_empty(i + B.stages - B.value_stages());
      auto& described = memory.tiles[i % B.stages];
      if (lane == 0) described = tile;
      const bool non_finite_values = side.store_row_values(values, values_at(i), lane);
      // After a score that bounds its products, a row of Q with an infinity has a finite LSE and a finite δ.
      if (lane == 0) described.may_be_non_finite = non_finite_values || B.keeps_chain();
      // An LSE of +∞ marks a row that the forward left empty: with a list that truncates, its elements are tested.
      bool hides = B.truncates && non_finite_values;
      // For tile 0 the consumers read own_replaced themselves, so that LSE and δ need not wait for the block's own
      // rows.
      if (B.adds_dq() && i > 0) hides = hides || own_replaced();
      if (lane == 0 && hides) described.hides = true;
      __syncwarp();
      if (lane == 0) stream().publish(i);
    }
  }

  __device__ __forceinline__ bool own_replaced() const {
    ptx::mbarrier_wait(ptx::shared_address(&memory.own_checks), 0);
    return memory.own_replaced;
  }
  // Adds the dQ that the groups have stored to shared memory to the sums in memory.
  __device__ __forceinline__ void add_dq(int count) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if constexpr (B.has_list()) query_sums().wait(i * groups);  // then memory.listed has the tile, too
      const auto tile = B.has_list() ? memory.listed[i % kListed] : side.place(i);
      float* to = side.query_sums(tile);
      bool is_first = false;
      if constexpr (B.ordered) {
        is_first = side.is_first(tile);
        if (!is_first) side.await_turn(tile);
      }
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        const int use = i * groups + group;
        query_sums().wait(use);
        if (query_columns != B.d || side.has_row(tile, group * kSumRows)) {
          const u32 bytes = group == 0 ? query_part_bytes : kSumRows * last_query_columns * 4;
          float* part = to + group * (query_part_bytes / 4);
          if (is_first) {
            ptx::tma_store(part, query_sums_at(group), bytes);
          } else {
            ptx::tma_add(part, query_sums_at(group), bytes);
          }
        }
        ptx::tma_commit();
        ptx::tma_wait_read();
        query_sums().release(use);
      }
      if constexpr (B.ordered) {
        ptx::tma_wait();
        side.end_turn(tile);
      }
    }
    ptx::tma_wait();
  }
  // Each checker warp takes all tiles of its own stages. If it skipped a tile, it could not tell whether the phase
  // before the one that it waits for has ended (ptx/mbarrier.cuh).
  __device__ __forceinline__ void check(int checker, int count) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      i = ptx::uniform(i);  // otherwise an address spills with splits_rows
      if (i % B.stages % kCheckers != checker) continue;
      stream().wait(i);
      const auto& tile = memory.tiles[i % B.stages];
      if (tile.hides) {
        const bool replaced = tile.may_be_non_finite && replace_rows(i);
        if (lane == 0) memory.replaced[i % B.stages] = replaced;
        if (replaced) side.poison(memory.non_finite[i % B.stages], values_at(i), lane);
        ptx::fence_async_proxy();
      }
      __syncwarp();
      if (lane == 0) {
        // This phase has ended already, or tile i would not have been copied. But consumers may have skipped the wait
        // for it, and checking tools expect a wait for every phase.
        if (i >= B.stages) checks().wait(i - B.stages);
        checks().publish(i);
        stream().release(i);
      }
    }
  }
  // Replaces values that are not finite by zeros; returns whether there were any. V needs no replacement, since dP of a
  // hidden key is not used. Products of S and dP may read a row before its replacement or after: elements that see it
  // become NaN whatever they read, and others do not depend on it.
  __device__ __forceinline__ bool replace_rows(int i) const {
    constexpr bool rows_stream = !B.keeps_queries();
    const bool finite = NonFinite::template are_finite<32, StreamQk>(qk_at(i), lane) &&
                        (!rows_stream || NonFinite::template are_finite<32, StreamOv>(ov_at(qk_at(i)), lane));
    if (__all_sync(kAllLanes, finite)) return false;
    NonFinite& rows = memory.non_finite[i % B.stages];
    rows.clear(lane);
    __syncwarp();
    NonFinite::template replace<32, StreamQk>(qk_at(i), rows.first, lane);
    if constexpr (rows_stream) NonFinite::template replace<32, StreamOv>(ov_at(qk_at(i)), rows.second, lane);
    __syncwarp();
    return true;
  }
};

}  // namespace tessera::cuda
