// SPDX-License-Identifier: Apache-2.0
#include "cases/random/problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cases/random/draw.h"
#include "cases/random/extremes.h"

namespace tessera::cases {
namespace {

/// Multiply-adds of one product of the two in a forward, beyond which a case is made smaller. A backward does more.
constexpr std::int64_t kForwardBudget = 1'200'000;
constexpr std::int64_t kBackwardBudget = 600'000;
/// A GPU's tiles are larger: that several of them come up takes more keys.
constexpr std::int64_t kGpuFactor = 12;

class Generator : public RandomDraw {
 public:
  template <class... Arguments>
  explicit Generator(const RandomScope& scope, Arguments&&... arguments)
      : RandomDraw(std::forward<Arguments>(arguments)...), scope_(scope) {}

  Case generate() {
    types();
    if (scope_.queries > 0) {
      few_queries();
      return case_;
    }
    const std::int64_t operation = chooser_.below(100);
    if (operation < 5) {
      combine();
    } else if (operation < 12) {
      kv_append();
    } else if (operation < 17) {
      linear_decode();
    } else if (operation < 21) {
      linear_chunk();
    } else if (operation < 24) {
      nsa_pool();
    } else if (operation < 27) {
      nsa_select();
    } else if (operation < 30) {
      nsa_gate();
    } else if (operation >= 96) {
      quantize();
    } else {
      attention();
    }
    return case_;
  }

 private:
  /// `paged`: how often keys of a forward lie in pages.
  void key_sizes(KvSource& source, std::int64_t longest, std::vector<std::int64_t>& lens,
                 std::vector<std::int64_t>& used, double paged = 0.4) {
    source.seqlen = longest;
    if (chooser_.chance(p_.pass == Pass::forward ? paged : 0.0)) {
      source.layout = random_.chance(0.5) ? KvLayout::paged_table : KvLayout::paged_csr;
      source.page_size = page_size();
      const std::int64_t pages = (longest + source.page_size - 1) / source.page_size;
      source.pages = p_.batch * pages + random_.between(0, 2);
      if (random_.chance(0.15)) source.pages = std::max<std::int64_t>(1, pages);  // sequences share pages
      source.seqused = source.layout == KvLayout::paged_table;
      v_.shuffled_pages = random_.chance(0.6);
      for (std::int64_t b = 0; b < p_.batch; ++b) lens.push_back(length(longest, b == 0));
      return;
    }
    source.seqused = random_.chance(0.25);
    const bool varlen = random_.chance(0.45);
    source.layout = varlen ? KvLayout::varlen : KvLayout::dense;
    if (varlen) {
      for (std::int64_t b = 0; b < p_.batch; ++b) lens.push_back(length(longest, b == 0));
      source.total = std::accumulate(lens.begin(), lens.end(), random_.between(0, 5));
    }
    if (!source.seqused) return;
    std::vector<std::int64_t>& target = varlen ? used : lens;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      const std::int64_t most = varlen ? lens[static_cast<std::size_t>(b)] : longest;
      target.push_back(b == 0 && p_.batch > 1 ? most : length(most, random_.chance(0.3)));
    }
  }

  void attention() {
    p_.pass = (gpu_ ? chooser_.chance(0.3) : random_.chance(0.48)) ? Pass::backward : Pass::forward;
    heads_and_dims();
    std::int64_t rows = random_.chance(0.3) ? random_.between(0, 3) : random_.between(0, gpu_ ? 300 : 48);
    std::int64_t keys = random_.between(0, gpu_ ? 700 : 90);
    if (!gpu_ && random_.chance(0.8)) {
      static constexpr std::int64_t kTileQ[] = {8, 8, 16, 16, 24, 32};
      static constexpr std::int64_t kTileKv[] = {16, 16, 16, 32, 32, 48, 64};
      case_.wishes.tile_q = random_.pick(kTileQ);
      case_.wishes.tile_kv = random_.pick(kTileKv);
      rows = 2 * *case_.wishes.tile_q + random_.between(1, 20);
      keys = 2 * *case_.wishes.tile_kv + random_.between(1, 30);
    }
    shrink(rows, keys);
    query_sizes(rows);
    const bool segments = random_.chance(0.22);
    key_sizes(p_.kv, segments ? random_.between(0, keys) : keys, v_.lens_k, v_.used_k);
    if (segments) {
      p_.kv2.emplace();
      key_sizes(*p_.kv2, std::max<std::int64_t>(0, keys - p_.kv.seqlen + random_.between(0, 5)), v_.lens_k2,
                v_.used_k2);
    }
    positions();
    window();
    scores();
    tiles();
    outputs();
    make_extreme(case_, random_, gpu_);
    eight_bits();
  }

  /// Decode steps, speculative ones, and batches that hold a prefill or two beside them.
  void few_queries() {
    heads_and_dims();
    p_.batch = random_.between(1, gpu_ ? 40 : 6);
    std::int64_t rows = random_.between(random_.chance(0.05) ? 0 : 1, scope_.queries);
    std::int64_t keys = random_.between(0, gpu_ ? random_.chance(0.1) ? 9000 : 1500 : 200);
    const bool mixed = random_.chance(0.2);
    shrink(rows, keys);
    if (mixed) {
      p_.q_layout = Layout::varlen;
      for (std::int64_t b = 0; b < p_.batch; ++b) {
        v_.lens_q.push_back(random_.chance(0.125) ? random_.between(0, gpu_ ? 300 : 40) : random_.between(0, rows));
      }
      p_.seqlen_q = *std::ranges::max_element(v_.lens_q) + random_.between(0, 2);
      p_.total_q = std::accumulate(v_.lens_q.begin(), v_.lens_q.end(), random_.between(0, 5));
    } else {
      query_sizes(rows);
    }
    key_sizes(p_.kv, keys, v_.lens_k, v_.used_k, 0.7);
    if (random_.chance(0.1)) {
      p_.kv2.emplace();
      key_sizes(*p_.kv2, random_.between(0, 60), v_.lens_k2, v_.used_k2);
    }
    if (random_.chance(0.3)) positions();
    if (random_.chance(0.5)) p_.window.right = 0;
    if (random_.chance(0.4)) window();
    scores();
    p_.lse = random_.chance(0.6);
    p_.batch_invariant = random_.chance(0.1);
    if (!p_.batch_invariant && random_.chance(0.5)) case_.wishes.splits = random_.between(2, 9);
    make_extreme(case_, random_, gpu_);
    eight_bits();
  }

  /// Fewer sequences, then heads, then dims, until the work fits the budget.
  void shrink(std::int64_t rows, std::int64_t keys) {
    const std::int64_t budget = (p_.pass == Pass::forward ? kForwardBudget : kBackwardBudget) * (gpu_ ? kGpuFactor : 1);
    const auto work = [&] { return p_.batch * p_.heads_q * rows * keys * std::max(p_.head_dim_qk, p_.head_dim_v); };
    const std::int64_t group = p_.group();
    while (work() > budget && p_.batch > 1 && !random_.chance(0.1)) --p_.batch;
    while (work() > budget && p_.heads_kv > 1 && !random_.chance(0.1)) p_.heads_q = group * --p_.heads_kv;
    while (work() > budget && p_.group() > 1 && !random_.chance(0.1)) p_.heads_q -= p_.heads_kv;
    if (gpu_) return;  // the dims are the kernel's
    while (work() > budget && std::max(p_.head_dim_qk, p_.head_dim_v) > 8) {
      if (random_.chance(0.05)) break;
      std::int64_t& dim = p_.head_dim_qk > p_.head_dim_v ? p_.head_dim_qk : p_.head_dim_v;
      const bool same = p_.head_dim_qk == p_.head_dim_v;
      dim -= 8;
      if (same) p_.head_dim_qk = p_.head_dim_v = dim;
    }
  }

  std::vector<std::int64_t> offsets(std::int64_t about) {
    std::vector<std::int64_t> list;
    for (std::int64_t b = 0; b < p_.batch; ++b) list.push_back(about + random_.between(-20, 60));
    return list;
  }

  void positions() {
    // Far from 0: positions need 64 bits where masks compare them.
    const std::int64_t far = random_.chance(0.1) ? std::int64_t{1} << 33 : 0;
    const bool keys = random_.chance(0.15) || far != 0;
    if (random_.chance(0.2) || far != 0) v_.q_offset = offsets(far);
    if (keys) v_.k_offset = offsets(far);
    if (p_.kv2 && random_.chance(0.35)) v_.k_offset2 = offsets(far);
    if (random_.chance(0.15)) v_.batch_offset = random_.between(1, 5);
    if (random_.chance(0.15)) v_.head_offset = random_.between(1, 9);
  }

  void window() {
    const std::int64_t kind = random_.below(100);
    if (kind < 25) {
      p_.window.right = 0;
    } else if (kind < 43) {
      if (random_.chance(0.75)) p_.window.left = random_.between(0, 50);
      if (!p_.window.left || random_.chance(0.6)) p_.window.right = random_.between(0, 30);
    } else if (kind < 52) {
      if (random_.chance(0.5)) {
        p_.window.right = -random_.between(1, 12);
        if (random_.chance(0.5)) p_.window.left = random_.between(12, 50);
      } else {
        p_.window.left = -random_.between(1, 12);
        if (random_.chance(0.5)) p_.window.right = random_.between(12, 50);
      }
    }
    if (random_.chance(0.1)) p_.compressed_causal = CompressedCausal{random_.between(1, 32), random_.between(1, 8)};
    if (random_.chance(0.1)) p_.chunk = random_.between(1, 120);
  }

  void scores() {
    if (random_.chance(0.15)) {
      p_.scale = static_cast<float>(random_.between(50, 200)) / 100.0F / std::sqrt(static_cast<float>(p_.head_dim_qk));
    }
    if (chooser_.chance(0.15)) p_.softcap = static_cast<float>(random_.between(1, 30));
    if (chooser_.chance(0.15)) {
      p_.alibi = true;
      v_.slopes_per_batch = random_.chance(0.4);
    }
    if (chooser_.chance(0.18)) p_.score = chooser_.chance(0.5) ? "relative" : "soft_clip";
    static constexpr const char* kMasks[] = {"document", "checkerboard", "prefix"};
    if (chooser_.chance(0.2)) p_.mask = chooser_.pick(kMasks);
    p_.sink = random_.chance(0.2);
    if (chooser_.chance(0.16)) {
      p_.dropout = static_cast<float>(random_.between(5, 70)) / 100.0F;
      seeds();
    }
  }

  TileList list() {
    static constexpr TileList::Form kForms[] = {TileList::Form::indices, TileList::Form::bitmask,
                                                TileList::Form::transposed};
    static constexpr TileList::Heads kHeads[] = {TileList::Heads::one, TileList::Heads::kv, TileList::Heads::q};
    return {random_.pick(kForms), random_.pick(kHeads), random_.chance(0.65), random_.chance(0.4)};
  }

  void tiles() {
    static constexpr std::int64_t kBlockQ[] = {1, 4, 8, 16, 17, 32, 64};
    static constexpr std::int64_t kBlockKv[] = {1, 5, 8, 16, 24, 32, 64, 128};
    const bool forward = p_.pass == Pass::forward;
    if (chooser_.chance(0.32)) p_.list = list();
    if (!forward && random_.chance(0.25)) p_.bwd_list = list();
    if (forward && chooser_.chance(0.25)) {
      p_.next = random_.chance(0.5) ? TileList::Form::indices : TileList::Form::bitmask;
      p_.next_threshold = random_.chance(0.2) ? 0.0F : static_cast<float>(random_.between(1, 300)) / 1000.0F;
    }
    if (forward && chooser_.chance(0.3)) p_.mass = random_.chance(0.5) ? MassKind::mean : MassKind::rms;
    if (forward && chooser_.chance(0.1)) skip();
    const bool weighs = p_.next != TileList::Form::none || p_.mass != MassKind::none;
    p_.mass_prior_lse = weighs && random_.chance(0.4);
    if (p_.list || p_.bwd_list || weighs) {
      static constexpr std::int64_t kGpuBlockQ[] = {16, 64, 64, 128, 128, 256};
      static constexpr std::int64_t kGpuBlockKv[] = {16, 32, 64, 64, 128, 128};
      const bool usual = gpu_ && random_.chance(0.8);
      p_.block_q = usual ? random_.pick(kGpuBlockQ) : random_.pick(kBlockQ);
      p_.block_kv = usual ? random_.pick(kGpuBlockKv) : random_.pick(kBlockKv);
      v_.density = static_cast<float>(random_.between(2, 10)) / 10.0F;
    }
  }

  void skip() {
    static constexpr std::int64_t kGrowths[] = {0, 1, 1, 1, 5, 255};
    p_.list = {.form = TileList::Form::bitmask};
    p_.next = TileList::Form::none;
    p_.next_threshold = 0.0F;
    p_.mass = MassKind::none;
    p_.skip.kind = random_.chance(0.6) ? SkipRule::Kind::mass : SkipRule::Kind::threshold;
    if (p_.skip.kind == SkipRule::Kind::mass) p_.skip = {p_.skip.kind, random_.chance(0.3), random_.pick(kGrowths)};
  }

  void outputs() {
    const bool forward = p_.pass == Pass::forward;
    if (forward) {
      p_.lse = random_.chance(0.6);
    } else {
      p_.dlse = random_.chance(0.25);
      p_.grad_fp32 = random_.chance(0.35);
      p_.accumulate = p_.grad_fp32 && random_.chance(0.5);
    }
    p_.residual = p_.o_type != DType::fp32 && random_.chance(0.3);
    p_.deterministic = random_.chance(0.2);
    p_.batch_invariant = random_.chance(0.2);
    // Those need a row's keys in one part. A backward's dQ is added over as many.
    const bool whole = p_.batch_invariant || p_.next != TileList::Form::none || p_.mass != MassKind::none || p_.skip;
    if (!whole && random_.chance(forward ? 0.4 : 0.3)) case_.wishes.splits = random_.between(2, 4);
  }

  const RandomScope scope_;
};

}  // namespace

Case random_case(std::uint64_t seed, std::uint64_t index, const std::vector<std::string>& isas,
                 const RandomScope& scope) {
  return Generator(scope, seed, index, isas).generate();
}

Case random_gpu_case(std::uint64_t seed, std::uint64_t index, const RandomScope& scope) {
  return Generator(scope, seed, index).generate();
}

void redraw_values(Case& problem, std::uint64_t seed, std::uint64_t index) {
  RandomNumbers random(seed ^ 0x76616c756573, index);
  Values& values = problem.values;
  values.seed = random.bits() >> 40;
  if (problem.problem.operation != Operation::attention) return;
  for (auto* lengths :
       {&values.lens_q, &values.lens_k, &values.lens_k2, &values.used_q, &values.used_k, &values.used_k2})
    for (std::int64_t& length : *lengths)
      if (!random.chance(0.3)) length = random.between(0, length);
  const auto cut = [](std::vector<std::int64_t>& used, const std::vector<std::int64_t>& lengths) {
    for (std::size_t i = 0; i < used.size(); ++i) used[i] = std::min(used[i], lengths[i]);
  };
  cut(values.used_q, values.lens_q);
  cut(values.used_k, values.lens_k);
  cut(values.used_k2, values.lens_k2);
}

}  // namespace tessera::cases
