// SPDX-License-Identifier: Apache-2.0
// The forward by wgmma: from the products of a tile to its probabilities.
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
  // Of 8 bits, where registers do not suffice to compute rows again, or scores are changed before maxima are taken.
  static constexpr bool looks_always = of_bytes && (C.scale_first || C.tile_kv / 2 + C.dv / 2 + C.tile_kv / 8 > 180);
  // What is hidden is found beside the products, but not where what scores and masks load would want registers at once.
  static constexpr bool finds_hidden_early = C.tests_elements() && !C.scale_first;
  // Probabilities of tiles of which a warp's rows see no key are 0, without a softmax.
  static constexpr bool passes_hidden = finds_hidden_early && C.skip == Skip::none && !of_bytes;
  // Sums of int8 become scores one by one between the exponentials, which another unit computes, in tiles that hide no
  // key and need no maximum: at 64 columns, where the exponentials are the limit; wider heads are up to 9% slower so.
  // What skip states of the rule `threshold` keep leaves no registers for that.
  static constexpr bool converts_late =
      C.int8_scores && C.d <= 64 && C.dv <= 64 && !C.scale_first && !C.tests_elements() && C.skip != Skip::threshold;
  // e4m3 ends at 448: P is 2^4 at the maximum that its origin follows, and at most 2^8. Slopes as of ALiBi's first
  // heads raise scores by 60 to 130 bits in 128 keys: P of bf16 leaves 48 of them above the maximum.
  static constexpr bool has_range = C.type == Element::bf16 && !of_bytes;
  static constexpr int offset_bits = of_bytes ? 4 : has_range && C.linear_score ? -48 : 0;
  using Online = Softmax<1, of_bytes ? 8 : has_range ? 30 : 15, C.rounded_sums, offset_bits>;
  using Scores = Accumulator<1, C.tile_kv / 8>;
  using Products = Accumulator<1, C.tile_kv / 8, typename SumOf<C.int8_scores>::type>;  // Q·Kᵀ
  using Measure = TileMeasure<C>;
  using Probabilities = u32[C.tile_kv / depth_of_product(C.type)][4];  // as an A operand

  // Whether a tile's exponentials end with a look at what the next step waits for: three groups, and what skip states
  // of the rule `threshold` keep, leave no registers for the answers.
  static constexpr bool looks_ahead = !Base::registers_are_short && C.skip != Skip::threshold;

  // Whether a tile that no row ends in wants nothing in front of its exponentials but, of e4m3, a factor that seldom is
  // too large to be fused: one branch for that and for the ends then.
  static constexpr bool is_plain =
      !converts_late && !looks_always && !C.scale_first && !C.tests_elements() && !C.linear_score && !C.folds_rows();

  // Whether P·V of the keys before is waited for, and probabilities are packed, beside a tile's last exponentials: not
  // where products take twice the time of these, where registers do not suffice, and where not every tile has them.
  static constexpr bool packs_early =
      (of_bytes || C.int8_scores || C.d + C.dv <= 128) && C.dv <= 192 && !C.dropout && !passes_hidden;

  // Takes what the warp's rows say of a skip state's tiles.
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

  // Packed.
  __device__ __forceinline__ int first_row_of_thread(const Work& work) const {
    const int own = thread_again();
    return work.block.first_row + own / 32 * 16 + own % 32 / 4;
  }
  // What a tile's step knows of what the next one waits for. What it does not know of may be there all the same.
  struct Ahead {
    bool has_keys = false;        // the next tile's keys are in the ring
    bool has_values = false;      // the tile's own values are
    bool looked_through = false;  // the tile's values are looked through, for which P·V waits
  };
  // A tile of keys on its way to probabilities.
  struct Step {
    const int use;  // of the ring
    const KvTile tile;
    const float scale;    // of scores to log2
    const float product;  // of products of 8 bits to scores; else 1
    Ahead ahead{};
  };
  __device__ __forceinline__ Step step_of(const Work& work, int use) const {
    float product = 1.0F;
    if constexpr (of_bytes) product = work.product;
    return {use, work.tiles.at(use - work.first_use), softmax_scale(work), product};
  }
  // Asks barriers without waiting, in front of the last exponentials: these stand in the same queue, so that an answer
  // asked for behind them would come late.
  __device__ __forceinline__ void look_ahead(Step& step) const {
    if constexpr (!looks_ahead) return;
    step.ahead.has_keys = keys().test(step.use + 1);
    step.ahead.has_values = multiplied().test(step.use);
  }
  // Of rows of int8, once these are there.
  __device__ __forceinline__ void find_rows(const Work& work) const {
    const int own = thread_again();
    int8_scores().template find_rows<QTile>(p, descales, work, q_at(), own / 32 % 4 * 16, own / 32 * 16, own % 32);
  }
  // Beside exponentials that are computed again.
  struct NoOverlap {
    __device__ __forceinline__ void pass_turn() const {}
    __device__ __forceinline__ void await_outputs() const {}
  };
  // Of scores that are there, and of those that sums of int8 become when their exponentials are due.
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

  // Sums of int8 to products of what was quantised, or as near as softmax_scale() wants; other products as they are.
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
  // Unless converts_late; else room for them.
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
  // What the rows' scaled scores lack, some of which is added to the scores instead.
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
  // Products to scores. What these lack of the rows' scaled scores.
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

  // Products, or scores unless converts_late, to probabilities.
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

  // Scores to probabilities. Few tiles of few rows raise the maximum by much: where no key is hidden it is not even
  // looked for, and the sum of the probabilities tells when it should have been. They are divided then; and only where
  // that is too late, this warp's products are computed again, which changes no bit of the other rows' (tests/device:
  // Identity.RowsDoNotKnowEachOther). Of 8 bits only those of rows that need it: mma.sync does not add as wgmma does.
  // Where keys are hidden one by one, the maximum is looked for in rows that have seen no key yet.
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

  // `looks`: whether origins were raised to the maxima of these scores, so that no sum overshoots. `rescale`: what O is
  // multiplied by for that; overshooting sums change it.
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
  // Raises the origins of rows whose sums have overshot since they were `before`, and computes anew what is to be.
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
        // Without tests of elements no key is hidden.
        if constexpr (C.scale_first || C.tests_elements()) finish(work, s, step, hidden);
        rescale = softmax.raise(s, step.scale, slack, shift);
        before[0] = softmax.sum[0][0];
        before[1] = softmax.sum[0][1];
        exponentiate(s, step, shift, softmax, measure, NoOverlap{}, NoConversion{});
      }
    }
    softmax.follow(before, s, rescale);
  }

  // Finished scores of those of a thread's two rows that `which` names; S holds probabilities of the other.
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
        if (!which[i / 2] && of_columns[i] < 0.0F) of_columns[i] = 0.0F;  // hidden
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

  // What P is multiplied with: V, of 8 bits transposed.
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
