// SPDX-License-Identifier: Apache-2.0
// The forward by wgmma: the rows of Q of a consumer group and their copy to shared memory; and their products with a
// tile of keys by mma.sync, for scores that are computed again.
#pragma once

#include "cuda/attention/forward/producer.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

template <FwdConfig C>
struct QueryTiles : Producer<C> {
  using Base = Producer<C>;
  using Base::groups, Base::items, Base::k_at, Base::maps, Base::p, Base::q_base, Base::shared;
  using typename Base::KTile, typename Base::QTile, typename Base::Work;
  static constexpr bool registers_are_short = groups == 3 || (C.linear_score && C.dv > 192);
  // The first of the named barriers of groups, one for each.
  static constexpr int kGroup = 4;

  // These read the thread's number again rather than keeping it, since registers are short.
  __device__ __forceinline__ int group() const { return ptx::uniform(static_cast<int>(threadIdx.x) / 128); }
  static __device__ __forceinline__ int thread_again() {
    const int thread = ptx::afresh(static_cast<int>(threadIdx.x));
    __builtin_assume(registers_are_short || thread >= 0);  // makes divisions shifts; 1% slower with three groups
    return thread;
  }

  __device__ __forceinline__ u32 q_at() const { return q_base + group() * QTile::bytes; }

  __device__ __forceinline__ int group_number() const {
    return registers_are_short ? group() : static_cast<int>(threadIdx.x) / 128;
  }
  __device__ __forceinline__ void group_barrier() const { ptx::barrier_sync(kGroup + group_number(), 128); }

  /// Begins the copy of the group's rows of a row tile, by TMA if they are a box. Returns false if there is no such row
  /// tile.
  __device__ __forceinline__ bool begin_queries(int item) const {
    items().wait(item);
    if (item == shared.end) return false;
    const Work& work = shared.works[item & 1];
    const int first = work.block.first_row + group() * 64;
    const int in_group = thread_again() % 128;
    if (maps->has_queries != 0) {
      if (in_group == 0) copy_queries(work, first);
      return true;
    }
    const PackedRows rows(p.q, bytes_of(C.q_type()), p.q_strides, work.block, work.sequence.q.first, p.group);
    const int valid = static_cast<int>(work.sequence.q.length * p.group.value) - first;
    load_tile<QTile, 128>(q_at(), valid, p.d, in_group,
                          [&](int row) { return rows.at(first - work.block.first_row + row); });
    ptx::cp_async_commit();
    return true;
  }
  // One thread calls this. Addresses are computed here, because kept ones would take registers. Rows behind the end of
  // the sequence are those of other sequences, or zeros behind the tensor's end; results of these rows are not used.
  __device__ __forceinline__ void copy_queries(const Work& work, int first) const {
    const int head = p.q_strides.head == 0 ? 0 : work.block.head;
    const int row = work.sequence.q.first + PackedRow(first, p.group).query;
    const int batch = p.q_strides.batch == 0 ? 0 : work.block.batch;
    const u32 to = ptx::afresh(static_cast<int>(q_base)) + thread_again() / 128 * QTile::bytes;
    ptx::mbarrier_arrive_expecting(queries(), QTile::bytes);
    copy_box<QTile>(&maps->queries, to, queries(), head, row, batch);
  }
  __device__ __forceinline__ u32 queries() const {
    const int group = thread_again() / 128;
    return ptx::afresh(static_cast<int>(ptx::shared_address(shared.queries))) + group * 8;
  }
  // What threads have copied or set to zero is visible to wgmma after the fence and the barrier.
  __device__ __forceinline__ void await_queries(int item) const {
    if (maps->has_queries != 0) {
      ptx::mbarrier_wait(queries(), static_cast<u32>(item) & 1);
      return;
    }
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    group_barrier();
  }

  // S = Q·Kᵀ of a warp's rows, by mma.sync.
  template <class Products>
  __device__ __forceinline__ void multiply(Products& s, u32 k_tile) const {
    s.clear();
    const int own = thread_again();
    const u32 rows = rows_address<QTile>(q_at(), own / 32 % 4 * 16, own % 32);
    const u32 keys = keys_address<KTile>(k_tile, own % 32);
#pragma unroll 1
    for (int k = 0; k < C.d / depth_of_product(C.q_type()); ++k) {
      u32 a[1][4];
      load_rows<QTile>(a, rows, k);
      multiply_keys<C.q_type(), KTile>(s, a, keys, k);
    }
  }
  // Computes products again, and stores finish(half, column, product) to S, for those of a thread's two rows that
  // `which` selects.
  template <class Finish>
  __device__ __forceinline__ void overwrite(Accumulator<1, C.tile_kv / 8>& s, const bool (&which)[2], int use,
                                            Finish finish) const {
    const int own = thread_again();
    overwrite_scores<C.q_type(), QTile, KTile>(s, which, rows_address<QTile>(q_at(), own / 32 % 4 * 16, own % 32),
                                               keys_address<KTile>(k_at(use), own % 32), finish);
  }
};

}  // namespace tessera::cuda
