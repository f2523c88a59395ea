// SPDX-License-Identifier: Apache-2.0
// The forward by wgmma: turns the products of a tile into probabilities.
#pragma once

#include "cuda/attention/forward/query_tiles.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/finish_scores.cuh"
#include "cuda/attention/scores/linear_score.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/sparse/tile_measure.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/gemm_wgmma.cuh"

namespace tessera::cuda {

template <FwdConfig C, class User>
struct TileProbabilities : QueryTiles<C> {
  using Base = QueryTiles<C>;
  using Base::checks, Base::descales, Base::int8_scores, Base::k_at, Base::keys, Base::p, Base::q_at,
      Base::thread_again, Base::values;
  using typename Base::KTile, typename Base::QTile, typename Base::Work;
  static constexpr bool of_bytes = C.multiplies_bytes();
  // Whether the maximum of every tile is computed: with 8 bits, if registers do not suffice to compute rows again, or
  // if scores are changed before the maxima.
  static constexpr bool looks_always = of_bytes && (C.scale_first || C.tile_kv / 2 + C.dv / 2 + C.tile_kv / 8 > 180);
  // Whether element tests overlap the products; not if the loads of scores and of masks would need registers at the
  // same time.
  static constexpr bool finds_hidden_early = C.tests_elements() && !C.scale_first;
  // Whether a warp skips the softmax of tiles in which its rows see no key; the probabilities are 0.
  static constexpr bool passes_hidden = finds_hidden_early && C.skip == Skip::none && !of_bytes;
  // Whether int8 sums are converted to scores between the exponentials, which another unit computes. That is done in
  // tiles that hide no key and need no maximum, with up to 64 columns, where exponentials are the limit; wider heads
  // would be up to 9% slower. The state of the rule `threshold` (Skip) leaves no registers for it.
  static constexpr bool converts_late =
      C.int8_scores && C.d <= 64 && C.dv <= 64 && !C.scale_first && !C.tests_elements() && C.skip != Skip::threshold;
  // The largest e4m3 is 448: P is 2^4 at the maximum that the origin follows, and at most 2^8. Slopes like those of
  // ALiBi's first heads raise scores by 60 to 130 octaves in 128 keys: with bf16 the origin is raised to 48 octaves
  // above the maximum, which leaves P room to grow.
  static constexpr bool has_range = C.type == Element::bf16 && !of_bytes;
  static constexpr int offset_bits = of_bytes ? 4 : has_range && C.linear_score ? -48 : 0;
  using Online = Softmax<1, of_bytes ? 8 : has_range ? 30 : 15, C.rounded_sums && !C.sums_by_product, offset_bits>;
  using Scores = Accumulator<1, C.tile_kv / 8>;
  using Products = Accumulator<1, C.tile_kv / 8, typename SumOf<C.int8_scores>::type>;  // Q·Kᵀ
  using Measure = TileMeasure<C>;
  using Probabilities = u32[C.tile_kv / depth_of_product(C.type)][4];  // as an A operand

  // Whether a step tests the barriers of the next step at the end of its exponentials. Three groups, and the state of
  // the rule `threshold`, leave no registers for the results.
  static constexpr bool looks_ahead = !Base::registers_are_short && C.skip != Skip::threshold;

  // Whether a tile that is not cut needs no work before its exponentials; with e4m3, except for a factor that is seldom
  // too large to be fused. Then one branch covers this factor and the cuts.
  static constexpr bool is_plain =
      !converts_late && !looks_always && !C.scale_first && !C.tests_elements() && !C.linear_score && !C.folds_rows();

  // Whether a tile's last exponentials overlap the wait for P·V of the previous tile and the packing of probabilities.
  // They do not if products take twice the time of exponentials, if registers do not suffice, or if some tiles have no
  // exponentials.
  static constexpr bool packs_early =
      (of_bytes || C.int8_scores || C.d + C.dv <= 128) && C.dv <= 192 && !C.dropout && !passes_hidden;

  // Receives what TileMeasure has measured of a skip state's tiles by the warp's rows.
  struct Measured {
    const TileProbabilities& kernel;
    const Work& work;
    __device__ __forceinline__ float2* scratch() const {
      char* of_warps = kernel.memory + C.tiles_end() + C.list_bytes();
      return reinterpret_cast<float2*>(of_warps + thread_again() / 32 * FwdConfig::kMeasuredBytes);
    }
    __device__ __forceinline__ void store(int /*tile*/, int block, float number) const {
      float* to = partials<C>(kernel.p, work.item) + thread_again() / 32 * kernel.p.list.key_blocks;
      if (block >= 0) to[block] = number;
    }
  };
  __device__ __forceinline__ Measured measured(const Work& work) const { return {*this, work}; }

  // The upper of the thread's two packed rows.
  __device__ __forceinline__ int first_row_of_thread(const Work& work) const {
    const int own = thread_again();
    return work.block.first_row + own / 32 * 16 + own % 32 / 4;
  }
  // What a tile's step knows about the waits of the next step. If has_keys or has_values is false, they may have
  // arrived all the same.
  struct Ahead {
    bool has_keys = false;        // the next tile's keys are in the ring
    bool has_values = false;      // the tile's own values have arrived
    bool looked_through = false;  // checkers search the tile's values, and P·V waits for that
  };
  // A tile of keys on its way to probabilities.
  struct Step {
    const int use;  // of the ring
    const KvTile tile;
    const float scale;    // from scores to units of log2
    const float product;  // from products of 8 bits to scores; otherwise 1
    Ahead ahead{};
  };
  __device__ __forceinline__ Step step_of(const Work& work, int use) const {
    float product = 1.0F;
    if constexpr (of_bytes) product = work.product;
    return {use, work.tiles.at(use - work.first_use), softmax_scale(work), product};
  }
  // Tests barriers without waiting, before the last exponentials: tests and exponentials share a queue, so that the
  // result of a later test would come late.
  __device__ __forceinline__ void look_ahead(Step& step) const {
    if constexpr (!looks_ahead) return;
    step.ahead.has_keys = keys().test(step.use + 1);
    step.ahead.has_values = multiplied().test(step.use);
  }
  // Finds the factors of the group's int8 rows, which must have arrived.
  __device__ __forceinline__ void find_rows(const Work& work) const {
    const int own = thread_again();
    int8_scores().template find_rows<QTile>(p, descales, work, q_at(), own / 32 % 4 * 16, own / 32 * 16, own % 32);
  }
  // For exponentials that are computed again: nothing overlaps them.
  struct NoOverlap {
    __device__ __forceinline__ void pass_turn() const {}
    __device__ __forceinline__ void await_outputs() const {}
  };
  // NoConversion: the scores are available. LateConversion: int8 sums are converted to scores just before their
  // exponentials.
  struct NoConversion {
    static constexpr bool is_late = false;
    __device__ __forceinline__ void convert(Scores& /*s*/, int /*n*/) const {}
  };
  struct LateConversion {
    static constexpr bool is_late = true;
    const Products& products;
    typename Int8Scores<C>::Factors factors;
    __device__ __forceinline__ void convert(Scores& s, int n) { factors.convert(s.tile[0][n], products.tile[0][n], n); }
  };

  // Converts int8 sums to products of the original numbers, but for factors that the softmax applies (softmax_scale(),
  // find_shift()). Returns other products as they are.
  __device__ __forceinline__ decltype(auto) descale(const Work& work, Products& products, const Step& step) const {
    if constexpr (C.int8_scores) {
      Scores s;
      const int own = thread_again();
      int8_scores().convert(s, products, work, step.use, own / 32 * 16, own % 32);
      return s;
    } else {
      return (products);
    }
  }
  // Returns the scores; with converts_late only room for them.
  __device__ __forceinline__ decltype(auto) scores_of(const Work& work, Products& products, const Step& step) const {
    if constexpr (converts_late) {
      return Scores();
    } else {
      return descale(work, products, step);
    }
  }
  __device__ __forceinline__ auto linear_score(const Work& work) const {
    const int own = thread_again();
    const u32 memory = this->q_base + C.q_bytes() + C.ring_bytes();
    return LinearScore<C, typename User::Score>{p, memory + static_cast<u32>(own / 4) * 16, first_row_of_thread(work),
                                                own % 32};
  }
  // Returns the correction that the rows' scaled scores lack (scores/row_shift.cuh). A part of it may be applied to the
  // scores here.
  __device__ __forceinline__ auto find_shift(const Work& work, Scores& s, const Step& step) const {
    if constexpr (C.linear_score) {
      return linear_score(work).change(work, s, step.tile);
    } else if constexpr (C.folds_rows()) {
      const int own = thread_again();
      return int8_scores().row_scale(step.use, own / 32 * 16, own % 32);
    } else {
      return NoShift{};
    }
  }
  // Turns products into scores. Returns the correction that the rows' scaled scores lack.
  __device__ __forceinline__ auto finish(const Work& work, Scores& s, const Step& step,
                                         const HiddenBits<C>& hidden) const {
    const auto shift = find_shift(work, s, step);
    if (C.scale_first || work.may_hide(step.tile)) finish_with(work, s, step.tile, hidden);
    return shift;
  }
  __device__ __forceinline__ void finish_with(const Work& work, Scores& s, const KvTile& tile,
                                              const HiddenBits<C>& hidden) const {
    const int own = thread_again();
    const FinishScores<C, User, Work> scores{p, work, own / 32 * 16, own % 32};
    if constexpr (finds_hidden_early) {
      scores.finish(s, tile, hidden);
    } else {
      scores.finish(s, tile);
    }
  }

  // Turns scores into probabilities; with converts_late it takes them from `products`.
  template <bool first, class Overlap>
  __device__ __forceinline__ typename Online::Rescale weigh(const Work& work, Products& products, Scores& s, Step& step,
                                                            const HiddenBits<C>& hidden, Online& softmax,
                                                            Measure& measure, const Overlap& overlap) const {
    if constexpr (converts_late) {
      if (!first && !step.tile.cut_begin && !step.tile.cut_end) {
        const auto shift = find_shift(work, s, step);
        const int own = thread_again();
        const LateConversion conversion{products, {int8_scores(), step.use, own / 32 * 16, own % 32}};
        return exponentiate_scores<first>(work, s, step, hidden, shift, softmax, measure, overlap, conversion);
      }
      s = descale(work, products, step);
    }
    if constexpr (!first && is_plain) {
      typename Online::Rescale rescale{};
      const bool cut = step.tile.cut_begin || step.tile.cut_end;
      if (cut || (of_bytes && step.product != 1.0F)) {
        if constexpr (of_bytes) s.scale(step.product);
        if (cut) {
          finish(work, s, step, hidden);
          rescale = softmax.raise(s, step.scale);
        }
      }
      exponentiate_and_correct(work, s, step, hidden, NoShift{}, softmax, measure, overlap, NoConversion{}, cut,
                               rescale);
      return rescale;
    }
    if constexpr (of_bytes) {
      if (C.scale_first || step.product != 1.0F) s.scale(step.product);
    }
    const auto shift = finish(work, s, step, hidden);
    return exponentiate_scores<first>(work, s, step, hidden, shift, softmax, measure, overlap, NoConversion{});
  }

  // Turns scores into probabilities. Few tiles raise the maximum of a row by much. So tiles that hide no key skip the
  // maximum, and the sum of the probabilities shows whether it was needed. If so, the probabilities are divided. Only
  // if they are too large for that, the warp's products are computed again, which changes no bit of other rows
  // (tests/device: Independence.RowsDoNotKnowEachOther). With 8 bits or linear scores only the rows that need it are
  // computed again; with 8 bits because mma.sync does not add as wgmma does. If elements are tested, the maximum is
  // computed for rows that have seen no key yet.
  template <bool first, class Shift, class Overlap, class Conversion>
  __device__ __forceinline__ typename Online::Rescale exponentiate_scores(const Work& work, Scores& s, Step& step,
                                                                          const HiddenBits<C>& hidden, Shift shift,
                                                                          Online& softmax, Measure& measure,
                                                                          const Overlap& overlap,
                                                                          const Conversion& conversion) const {
    typename Online::Rescale rescale{};
    const float scale = step.scale;
    const bool cut = step.tile.cut_begin || step.tile.cut_end;
    const bool looks = !Conversion::is_late && (first || looks_always || converts_late ||
                                                (cut && !C.tests_elements()) || (C.tests_elements() && C.scale_first));
    if (looks) rescale = softmax.raise(s, scale, {Online::kSlack, Online::kSlack}, shift);
    if constexpr (finds_hidden_early && !first && !looks_always) {
      if ((cut || !step.tile.waived) && softmax.lacks_keys()) rescale = softmax.raise_first(s, scale, shift);
    }
    exponentiate_and_correct(work, s, step, hidden, shift, softmax, measure, overlap, conversion, looks, rescale);
    return rescale;
  }

  // `looks`: whether the origins were raised to the maxima of these scores, so that no sum overshoots. `rescale`: the
  // factors of O that this requires; the correction of sums that overshoot changes them.
  template <class Shift, class Overlap, class Conversion>
  __device__ __forceinline__ void exponentiate_and_correct(const Work& work, Scores& s, Step& step,
                                                           const HiddenBits<C>& hidden, Shift shift, Online& softmax,
                                                           Measure& measure, const Overlap& overlap,
                                                           const Conversion& conversion, bool looks,
                                                           typename Online::Rescale& rescale) const {
    float before[2] = {softmax.sum[0][0], softmax.sum[0][1]};
    exponentiate(s, step, shift, softmax, measure, overlap, conversion);
    if constexpr (packs_early) overlap.pack(s);
    const bool overshoots = (!looks_always && softmax.overshoots(before) && !looks) || shift.recomputes;
    if (overshoots || looks || (finds_hidden_early && rescale.needed)) {
      if (overshoots) {
        correct(before, work, s, step, hidden, shift, softmax, measure, rescale);
        if constexpr (packs_early) overlap.pack(s);
      }
      if constexpr (C.skip == Skip::mass) {
        if (rescale.needed) measure.rescale(rescale.factor[0]);
      }
      if constexpr (packs_early) overlap.rescale_outputs(softmax, rescale);
    }
  }
  // Raises the origins of rows whose sums have overshot since they were `before`, and computes probabilities again
  // where follow() cannot divide them.
  template <class Shift>
  __device__ __forceinline__ void correct(float (&before)[2], const Work& work, Scores& s, Step& step,
                                          const HiddenBits<C>& hidden, const Shift& shift, Online& softmax,
                                          Measure& measure, typename Online::Rescale& rescale) const {
    if (softmax.overflows(before) || shift.recomputes) {
      if constexpr (of_bytes) {
        softmax.exponentiate_again(before, {false, false}, s, step.scale, rescale, [&](const bool(&which)[2]) {
          this->overwrite(s, which, step.use, [&](int /*half*/, int /*column*/, float x) { return x * step.product; });
        });
      } else if constexpr (C.linear_score) {
        bool steep[2] = {};
        if constexpr (!C.gathers()) linear_score(work).find_steep(steep);
        softmax.exponentiate_again(before, steep, s, 1.0F, rescale, [&](const bool(&which)[2]) {
          const int use = ptx::afresh(step.use);
          overwrite_linear_scores(work, s, which, use, this->step_of(work, use).tile, hidden);
        });
      } else {
        float slack[2];
        softmax.take_back(before, slack);
        multiply_again(work, s, step);
        // Without element tests, only tiles that are not cut come here.
        if constexpr (C.scale_first || C.tests_elements()) finish(work, s, step, hidden);
        rescale = softmax.raise(s, step.scale, slack, shift);
        before[0] = softmax.sum[0][0];
        before[1] = softmax.sum[0][1];
        exponentiate(s, step, shift, softmax, measure, NoOverlap{}, NoConversion{});
      }
    }
    softmax.follow(before, s, rescale);
  }

  // Computes the finished scores of those of a thread's two rows that `which` selects. S holds probabilities of the
  // other row.
  __device__ __forceinline__ void overwrite_linear_scores(const Work& work, Scores& s, const bool (&which)[2], int use,
                                                          const KvTile& tile, const HiddenBits<C>& hidden) const {
    const auto scores = linear_score(work);
    this->overwrite(s, which, use, [&](int half, int column, float product) {
      return scores.whole(product, half, column + tile.first + work.tiles.moved(tile, column / 8 * 8));
    });
    if (!work.may_hide(tile)) return;
    finish_with(work, s, tile, hidden);
#pragma unroll
    for (auto& of_columns : s.tile[0]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!which[i / 2] && of_columns[i] < 0.0F) of_columns[i] = 0.0F;  // a hidden score, −∞
      }
    }
  }

  __device__ __forceinline__ void multiply_again(const Work& work, Scores& s, const Step& step) const {
    if constexpr (C.int8_scores) {
      Products products;
      this->multiply(products, k_at(step.use));
      s = descale(work, products, step);
    } else {
      this->multiply(s, k_at(step.use));
    }
  }
  template <class Shift, class Overlap, class Conversion>
  __device__ __forceinline__ void exponentiate(Scores& s, Step& step, const Shift& shift, Online& softmax,
                                               Measure& measure, const Overlap& overlap, Conversion conversion) const {
    const float origins[2] = {shift.below(softmax.origin[0][0], 0), shift.below(softmax.origin[0][1], 1)};
    float scales[2] = {shift.of_row(step.scale, 0), shift.of_row(step.scale, 1)};
#pragma unroll
    for (int n = 0; n < C.tile_kv / 8; ++n) {
      if (n == C.tile_kv / 8 / 4) overlap.pass_turn();
      if (n == C.tile_kv / 8 * 3 / 4) {
        look_ahead(step);
        if constexpr (packs_early) {
          ptx::wgmma_wait_after(softmax.sum[0][0] + softmax.sum[0][1], keys().full(0));
          overlap.await_outputs();
        }
      }
      conversion.convert(s, n);
      if constexpr (Shift::columns > 0) {
        if (n * 8 % Shift::columns == 0) {
          const auto of_columns = shift.of_columns(n * 8 / Shift::columns);
          scales[0] = of_columns.of_row(step.scale, 0);
          scales[1] = of_columns.of_row(step.scale, 1);
        }
      }
      if constexpr (C.skip == Skip::threshold) measure.see(s.tile[0][n]);
      softmax.exponentiate(0, s.tile[0][n], scales, origins);
    }
    settle(s);
    if constexpr (!packs_early) {
      ptx::wgmma_wait_after(softmax.sum[0][0] + softmax.sum[0][1], keys().full(0));
    }
  }

  // The ring of the tiles that P is multiplied with: V, or with 8 bits its transpose.
  __device__ __forceinline__ Ring<C.stages> multiplied() const { return of_bytes ? checks() : values(); }

  static __device__ __forceinline__ void clear(Probabilities& probabilities) {
#pragma unroll
    for (auto& fragment : probabilities) {
#pragma unroll
      for (u32& pair : fragment) pair = 0;
    }
  }
  static __device__ __forceinline__ void pack_probabilities(Probabilities& probabilities, Scores& s,
                                                            const KeptBits<C>& kept) {
#pragma unroll
    for (int k = 0; k < C.tile_kv / 16; ++k) {
      if constexpr (C.dropout) {
        kept.apply(s.tile[0][2 * k], k, 0);
        kept.apply(s.tile[0][2 * k + 1], k, 1);
      }
      if constexpr (!of_bytes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& tile = s.tile[0][2 * k + i / 2];
          probabilities[k][i] = ptx::pack<C.type>(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
        }
      }
    }
    if constexpr (of_bytes) pack_bytes(probabilities, s);
  }

  __device__ __forceinline__ float softmax_scale(const Work& work) const {
    if constexpr (C.descales_at_once()) return work.score;
    return C.scale_first ? 1.0F : p.scale * kLog2E;
  }
};

}  // namespace tessera::cuda
