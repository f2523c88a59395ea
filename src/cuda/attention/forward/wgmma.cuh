// SPDX-License-Identifier: Apache-2.0
// The forward for SM90, by wgmma. Blocks are persistent and compute one row tile after another. Each consumer warpgroup
// has 64 packed rows of every row tile; a producer warpgroup feeds them (forward/producer.cuh). The products S of a
// tile, and P·V of the tile before it, overlap the softmax of the other groups. The end of a row tile overlaps the
// first copies of the next.
#pragma once

#include "cuda/attention/forward/replayed_list.cuh"
#include "cuda/attention/forward/tile_probabilities.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/finish_scores.cuh"
#include "cuda/attention/scores/linear_score.cuh"
#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/softmax/non_finite.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/sparse/tile_measure.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/gemm_wgmma.cuh"
#include "cuda/tile/promoted_sums.cuh"

namespace tessera::cuda {

template <FwdConfig C, class User = Callables<NoCallable, NoCallable>>
struct FwdWgmma : TileProbabilities<C, User> {
  using Base = TileProbabilities<C, User>;
  using Base::await_queries, Base::begin_queries, Base::checks, Base::group, Base::group_barrier, Base::group_number,
      Base::groups, Base::groups_differ, Base::items, Base::k_at, Base::keys, Base::lane, Base::p, Base::q_at,
      Base::q_base, Base::registers_are_short, Base::shared, Base::thread, Base::thread_again, Base::v_at, Base::values,
      Base::vt_at, Base::clear, Base::finds_hidden_early, Base::first_row_of_thread, Base::multiplied, Base::of_bytes,
      Base::pack_probabilities, Base::packs_early, Base::passes_hidden, Base::softmax_scale;
  using typename Base::Ahead, typename Base::KTile, typename Base::Measure, typename Base::Online,
      typename Base::Probabilities, typename Base::Products, typename Base::Scores, typename Base::Step,
      typename Base::QTile, typename Base::VTile, typename Base::VtTile, typename Base::Work, typename Base::Works;
  // What consumer groups take turns at, so that the softmax of one overlaps the products of the others.
  enum class InTurn { nothing, products, exponentials };
  static constexpr InTurn in_turn = C.exponentiates_in_turn()    ? InTurn::exponentials
                                    : groups >= 2 && C.ping_pong ? InTurn::products
                                                                 : InTurn::nothing;
  // Registers that setmaxnreg redistributes: the sum, over the warpgroups, of the registers of a thread. At launch each
  // thread has 128; with two groups 168, and with three blocks on a multiprocessor 80.
  static constexpr int all_registers = C.blocks() == 3 ? 160 : groups == 1 ? 256 : groups == 2 ? 504 : 512;
  // As many as the warp that finds row tiles needs.
  static constexpr int producer_registers = [] {
    const bool is_list = C.tiles == Tiles::list;
    if (is_list && C.source == Source::mixed) return 72;
    if ((is_list && C.varlen) || (C.skip != Skip::none && C.dv > 192)) return 64;
    if (C.blocks() == 3) return of_bytes ? 40 : 32;
    if (is_list || C.segments == 2 || C.compressed_causal || C.chunked || of_bytes) return 56;
    return groups == 3 ? 32 : 40;
  }();
  static constexpr int consumer_registers = (all_registers - producer_registers) / groups / 8 * 8;
  // Whether a tile's Step is read before its products begin, as registers allow, and not after they have begun.
  static constexpr bool reads_early = C.dv <= 192 && C.skip != Skip::threshold;
  using Output = Accumulator<1, C.output_tiles()>;
  using Sums = PromotedSums<C.dv, C.threads()>;

  static_assert(C.rows_a_warp() == 16 && !C.keeps_rests());

  static constexpr bool measures_ahead = C.skip != Skip::none && C.dv <= 192;  // begin_measure() before O is stored

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned.
  static __device__ __forceinline__ void run(const FwdParams& params, char* memory, const TensorMaps* maps,
                                             const DescaleParams& descales = {}) {
    const FwdWgmma kernel{{params, maps, descales, memory, *reinterpret_cast<Works*>(memory),
                           ptx::shared_address(memory) + FwdConfig::kWorkBytes}};
    if (threadIdx.x == 0) kernel.init();
    if constexpr (C.sums_by_product) kernel.store_ones();
    __syncthreads();
    if (kernel.group() < groups) {
      ptx::setmaxnreg_inc<consumer_registers>();
      ptx::griddepcontrol_wait_and_launch();
      kernel.compute();
    } else {
      ptx::setmaxnreg_dec<producer_registers>();
      kernel.produce(ptx::uniform(kernel.thread / 32) - C.warps);
    }
  }

  // Computes row tile after row tile: first S = Q·Kᵀ of its first tile of keys; then, together, S of the next tile and
  // O += P·V of the tile before; at the end the last O += P·V. All groups take equally many steps and release all
  // buffers, including those of keys that they skip.
  __device__ __forceinline__ void compute() const {
    if constexpr (in_turn != InTurn::nothing) {
      if (group() == groups - 1) scheduler_barrier_arrive<in_turn>();
    }
    const u32 q = ptx::uniform(q_at());
    Products products;
    Probabilities probabilities;
    Output o;
    Online softmax;
    Measure measure;
    bool more = begin_queries(0);
    if constexpr (measures_ahead) {
      if (more) begin_measure(shared.works[0], measure);
    }
#pragma unroll 1
    for (int item = 0; more; ++item) {
      // The work stays in shared memory, because registers are short; item % 2 would take one more.
      Work& work = shared.works[item & 1];
      int use = work.first_use;
      if constexpr (C.skip != Skip::none && !measures_ahead) begin_measure(work, measure);
      await_queries(work.item);
      if constexpr (C.descales_rows()) this->find_rows(work);
      if constexpr (groups_differ) {
#pragma unroll 1
        for (; use < own(work).first; ++use) skip(use);
      }
      keys().wait(use);
      const int end = own(work).end;  // from here on it is read by end_of()
      const u32 first = ptx::uniform(k_at(use));
      const Step first_step = this->step_of(work, use);
      scheduler_barrier_sync<InTurn::products>();
      begin_scores<C.q_type(), QTile, KTile>(products, q, first);
      scheduler_barrier_arrive<InTurn::products>();
      if constexpr (C.linear_score) this->linear_score(work).begin(work);
      o.clear();
      softmax.clear();
      int promoted_at = use + promoted_tiles;
      Ahead ahead = softmax_step<true>(work, first_step, products, probabilities, o, softmax, measure);
#pragma unroll 1
      while (++use < end_of(work, end)) {
        use = ptx::afresh(use);  // otherwise the previous value would be kept too
        const u32 k = ptx::uniform(k_at(use));
        const u32 v = ptx::uniform(multiplied_at(use - 1));
        if (!ahead.has_keys) keys().wait(use);
        const Step early = this->step_of(work, use);
        scheduler_barrier_sync<InTurn::products>();
        begin_scores<C.q_type(), QTile, KTile>(products, q, k);
        await_values(use - 1, ahead);
        begin_products(o, probabilities, v);
        scheduler_barrier_arrive<InTurn::products>();
        const Step step = reads_early ? early : this->step_of(work, use);
        ahead = softmax_step<false>(work, step, products, probabilities, o, softmax, measure);
        if constexpr (C.promotes()) {
          if (use == promoted_at) {
            promoted_sums().take(o, softmax.origin[0], !has_promoted(work, use));
            promoted_at += promoted_tiles;
          }
        }
      }
      use = end_of(work, end);
      const u32 v = ptx::uniform(multiplied_at(use - 1));
      await_values(use - 1, ahead);
      scheduler_barrier_sync<InTurn::products>();
      begin_products(o, probabilities, v);
      scheduler_barrier_arrive<InTurn::products>();
      const bool skips_more = groups_differ && use < work.end_use;
      if (skips_more) {
        await_outputs(o);  // copies of skipped tiles may need the buffer of these values
        release(multiplied(), use - 1);
#pragma unroll 1
        for (; use < work.end_use; ++use) skip(use);
      }
      group_barrier();  // all warps of the group have the scores of their rows, and have read Q
      more = begin_queries(work.item + 1);
      if constexpr (C.skip != Skip::none) finish_measure(work, measure, softmax);
      if constexpr (measures_ahead) {
        if (more) begin_measure(shared.works[(work.item + 1) & 1], measure);
      }
      await_outputs(o);
      if (!skips_more) release(multiplied(), end_of(work, end) - 1);
      if constexpr (C.promotes()) {
        if (has_promoted(work, end_of(work, end))) promoted_sums().add_to(o, softmax.origin[0]);
      }
      if constexpr (of_bytes) o.scale(work.value);
      if constexpr (C.linear_score) this->linear_score(work).finish_origins(work, softmax);
      const PackedRows out(work.outputs, bytes_of(C.output), p.o_strides, work.block, p.group);
      Epilogue<C>{p, work.block, work.sequence, q_base, thread_again()}.store(o, softmax, out);
      if (work.non_finite != 0) add_replaced(work);
      item = work.item;
      __syncwarp();
      if (lane == 0) items().release(item);
    }
  }

  // Every kPromotedKeys keys, O is added to sums in shared memory (PromotedSums). has_promoted(): whether this has
  // happened before use `end`.
  static constexpr int promoted_tiles = FwdConfig::kPromotedKeys / C.tile_kv;
  __device__ __forceinline__ Sums promoted_sums() const {
    return {q_base + C.q_bytes() + C.ring_bytes(), thread_again()};
  }
  __device__ __forceinline__ bool has_promoted(const Work& work, int end) const {
    return end - own(work).first > promoted_tiles;
  }

  // The functions below measure a skip state's tiles by the group's rows.
  __device__ __forceinline__ int rows_of_warp(const Work& work) const {
    return static_cast<int>(work.sequence.q.length) - work.block.first_row - thread_again() / 32 * 16;
  }
  __device__ __forceinline__ PackedRows skip_lse(const Work& work) const {
    const SkipParams& skip = skip_of_params(p);
    return PackedRows(skip.lse, 4, skip.lse_strides, work.block, work.sequence.q.first, p.group);
  }
  __device__ __forceinline__ void begin_measure(const Work& work, Measure& measure) const {
    const int thread = thread_again();
    if constexpr (C.skip == Skip::mass) {
      measure.begin(skip_lse(work), thread / 32 * 16, rows_of_warp(work), thread % 32);
    } else {
      measure.begin(rows_of_warp(work), thread % 32);
    }
  }
  __device__ __forceinline__ void finish_measure(Work& work, Measure& measure, Online& softmax) const {
    const int thread = thread_again();
    measure.finish(thread % 32, softmax_scale(work), softmax, this->measured(work));
    const bool unknown =
        end_rows<C>(measure, softmax, skip_lse(work), thread / 32 * 16, rows_of_warp(work), thread % 32);
    if (unknown) work.unknown = 1;
  }

  __device__ __forceinline__ void add_replaced(const Work& work) const {
    const int thread = thread_again();
    const Epilogue<C> epilogue{p, work.block, work.sequence, q_base, thread};
    char* behind = reinterpret_cast<char*>(list_window<C>(this->memory)) + C.list_window_bytes();
    u32* memory = reinterpret_cast<u32*>(behind + thread / 32 * C.list_replay_bytes());
    add_replaced_values<C, typename User::Mask>(p, work, epilogue, thread / 32 * 16, thread % 32, memory);
  }

  __device__ __forceinline__ Uses own(const Work& work) const {
    if constexpr (!groups_differ) return {work.first_use, work.end_use};
    return work.own[thread_again() / 128];
  }
  __device__ __forceinline__ int end_of(const Work& work, int kept) const {
    return registers_are_short ? own(work).end : kept;
  }
  /// Fills the panels of ones behind the tiles of V. wgmma sees them after a barrier of the block.
  __device__ __forceinline__ void store_ones() const {
    constexpr u32 pair = C.type == Element::bf16 ? 0x3f803f80 : 0x3c003c00;
    const u32 ones[4] = {pair, pair, pair, pair};
#pragma unroll 1
    for (int stage = 0; stage < C.stages; ++stage) {
#pragma unroll 1
      for (int at = thread * kChunkBytes; at < C.ones_bytes(); at += C.block_threads() * kChunkBytes) {
        ptx::store_shared_16(v_at(stage) + C.v_bytes() + at, ones);
      }
    }
    ptx::fence_async_proxy();
  }

  /// Passes a tile of keys that none of the group's rows sees.
  __device__ __forceinline__ void skip(int use) const {
    keys().wait(use);
    scheduler_barrier_sync<in_turn>();
    scheduler_barrier_arrive<in_turn>();
    release(keys(), use);
    multiplied().wait(use);
    release(multiplied(), use);
  }

  /// Waits for the scores that were begun and turns them into probabilities. Unless the tile is the row tile's first,
  /// also waits for the P·V that was begun and rescales O for the new probabilities.
  template <bool first>
  __device__ __forceinline__ Ahead softmax_step(Work& work, Step step, Products& products, Probabilities& probabilities,
                                                Output& o, Online& softmax, Measure& measure) const {
    const int use = step.use;
    const KvTile& tile = step.tile;
    if constexpr (C.skip != Skip::none) {
      measure.enter(key_block_of(p.list, tile), thread_again() % 32, step.scale, softmax, this->measured(work));
    }
    KeptBits<C> kept;
    if constexpr (C.dropout) kept.draw(p, work, thread / 32 * 16, tile, lane);
    [[maybe_unused]] HiddenBits<C> hidden;
    if constexpr (finds_hidden_early) {
      const int thread = thread_again();
      if (!tile.waived)
        hidden = FinishScores<C, User, Work>{p, work, thread / 32 * 16, thread % 32}.find_hidden(0, tile);
    }
    await_scores<first ? 0 : 1>(products);
    scheduler_barrier_sync<InTurn::exponentials>();
    auto&& s = this->scores_of(work, products, step);
    bool weighs_nothing = false;
    if constexpr (passes_hidden) weighs_nothing = !tile.waived && hidden.are_all_hidden();
    typename Online::Rescale rescale{};
    const Overlap<first> overlap{*this, use, o, probabilities, kept};
    if (!weighs_nothing) {
      rescale = this->template weigh<first>(work, products, s, step, hidden, softmax, measure, overlap);
    }
    step.ahead.looked_through = work.may_hide(tile);  // here, where its operands are at hand
    release(keys(), use);
    if constexpr (!packs_early) overlap.await_outputs();
    if constexpr (!first && !packs_early) softmax.apply(rescale, o);
    if (weighs_nothing) {
      clear(probabilities);
    } else if (!packs_early) {
      overlap.pack(s);
    }
    if constexpr (C.rounded_sums && !C.sums_by_product) {
#pragma unroll
      for (const auto& fragment : probabilities) softmax.template add_rounded<C.type>(0, fragment);
    }
    return step.ahead;
  }
  // What overlaps a tile's exponentials: the next group begins its own; P·V of the previous tile ends, which frees the
  // registers of the probabilities; and the new probabilities are packed.
  template <bool first>
  struct Overlap {
    const FwdWgmma& kernel;
    const int use;
    Output& o;
    Probabilities& probabilities;
    const KeptBits<C>& kept;
    __device__ __forceinline__ void pass_turn() const {
      kernel.template scheduler_barrier_arrive<InTurn::exponentials>();
    }
    __device__ __forceinline__ void await_outputs() const {
      if constexpr (!first) {
        kernel.await_outputs(o);
        kernel.release(kernel.multiplied(), use - 1);
      }
    }
    __device__ __forceinline__ void pack(Scores& s) const { pack_probabilities(probabilities, s, kept); }
    __device__ __forceinline__ void rescale_outputs(Online& softmax, const typename Online::Rescale& rescale) const {
      if constexpr (!first) softmax.apply(rescale, o);
    }
  };
  __device__ __forceinline__ void await_values(int use, const Ahead& ahead) const {
    // Without this wait, the phase of `checks` could be that of the buffer's previous use.
    if (!ahead.has_values) multiplied().wait(use);
    if (!of_bytes && ahead.looked_through) checks().wait(use);
  }

  /// `later`: the number of wgmma groups that were committed after that of the scores.
  template <int later>
  __device__ __forceinline__ void await_scores(Products& products) const {
    ptx::wgmma_wait<later>();
    settle(products);
  }
  __device__ __forceinline__ void await_outputs(Output& o) const {
    ptx::wgmma_wait<0>();
    settle(o);
  }
  __device__ __forceinline__ void release(const Ring<C.stages>& ring, int use) const {
    __syncwarp();
    if (thread_again() % 32 == 0) ring.release(use);
  }

  __device__ __forceinline__ u32 multiplied_at(int use) const { return of_bytes ? vt_at(use) : v_at(use); }
  static __device__ __forceinline__ void begin_products(Output& o, const Probabilities& probabilities, u32 v) {
    if constexpr (of_bytes) {
      begin_byte_outputs<VtTile>(o, probabilities, v);
    } else {
      begin_outputs<C.type, VTile>(o, probabilities, v);
    }
  }

  // A group has its turn between these two calls. They do nothing unless `what` is what groups take turns at.
  static constexpr int kSchedulerBarrier = 1;  // the first of the named barriers, one for each group
  template <InTurn what>
  __device__ __forceinline__ void scheduler_barrier_sync() const {
    if constexpr (what == in_turn && what != InTurn::nothing) {
      ptx::barrier_sync(kSchedulerBarrier + group_number(), 256);
    }
  }
  template <InTurn what>
  __device__ __forceinline__ void scheduler_barrier_arrive() const {
    if constexpr (what == in_turn && what != InTurn::nothing) {
      const int number = group_number();
      ptx::barrier_arrive(number == groups - 1 ? kSchedulerBarrier : kSchedulerBarrier + 1 + number, 256);
    }
  }
};

}  // namespace tessera::cuda
