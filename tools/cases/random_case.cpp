// SPDX-License-Identifier: Apache-2.0
#include "cases/random_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cases/random_extremes.h"
#include "cases/random_numbers.h"

namespace tessera::cases {
namespace {

/// Multiply-adds of one product of the two in a forward, beyond which a case is made smaller. A backward does more.
constexpr std::int64_t kForwardBudget = 1'200'000;
constexpr std::int64_t kBackwardBudget = 600'000;
/// A GPU's tiles are larger: that several of them come up takes more keys.
constexpr std::int64_t kGpuFactor = 12;
/// Consecutive problems for a GPU that share what is compiled into a kernel.
constexpr std::uint64_t kSameKernel = 64;

class Generator {
 public:
  Generator(std::uint64_t seed, std::uint64_t index, const std::vector<std::string>& isas)
      : random_(seed, index), chooser_(random_), p_(case_.problem), v_(case_.values) {
    v_.seed = random_.bits() >> 40;
    if (!isas.empty() && random_.chance(0.7)) {
      case_.isa = isas[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(isas.size())))];
    }
    if (random_.chance(0.08)) case_.threads = 2;
    v_.strides = random_strides(random_, false);
  }

  /// For a GPU: what a kernel is compiled for comes from a sequence of its own that moves on every kSameKernel
  /// problems.
  Generator(std::uint64_t seed, std::uint64_t index)
      : random_(seed, index),
        kernel_(~seed, index / kSameKernel),
        chooser_(kernel_),
        gpu_(true),
        p_(case_.problem),
        v_(case_.values) {
    v_.seed = random_.bits() >> 40;
    v_.strides = random_strides(random_, true);
  }

  Case generate() {
    types();
    const std::int64_t operation = chooser_.below(100);
    if (operation < 5) {
      combine();
    } else if (operation < 12) {
      kv_append();
    } else if (operation < 17) {
      linear_decode();
    } else if (operation < 21) {
      linear_chunk();
    } else {
      attention();
    }
    return case_;
  }

 private:
  void types() {
    if (gpu_) {
      p_.q_type = p_.k_type = p_.v_type = p_.o_type = chooser_.chance(0.5) ? DType::bf16 : DType::fp16;
      if (chooser_.chance(0.2)) p_.o_type = DType::fp32;
      return;
    }
    static constexpr DType kTypes[] = {DType::fp32, DType::fp16, DType::bf16};
    p_.q_type = p_.k_type = p_.v_type = p_.o_type = random_.pick(kTypes);
    if (random_.chance(0.25)) {
      for (DType* type : {&p_.q_type, &p_.k_type, &p_.v_type, &p_.o_type}) *type = random_.pick(kTypes);
    }
  }

  std::int64_t head_dim() {
    if (gpu_) {
      // Kernels are compiled for these; what lies between runs padded.
      static constexpr std::int64_t kDims[] = {32, 64, 64, 96, 128, 128, 192, 256, 512};
      const std::int64_t dim = chooser_.pick(kDims);
      return random_.chance(0.6) ? dim : dim - 8 * random_.between(1, 3);
    }
    if (random_.chance(0.06)) return 8 * random_.between(9, 64);
    return random_.chance(0.7) ? 8 * random_.between(1, 4) : 8 * random_.between(5, 8);
  }

  void heads_and_dims() {
    p_.batch = random_.chance(0.5) ? 1 : random_.between(2, 3);
    p_.heads_kv = random_.chance(0.6) ? 1 : random_.between(2, 3);
    p_.heads_q = p_.heads_kv * (random_.chance(0.55) ? 1 : random_.between(2, 4));
    p_.head_dim_qk = head_dim();
    p_.head_dim_v = chooser_.chance(0.7) ? p_.head_dim_qk : head_dim();
  }

  void combine() {
    p_.operation = Operation::combine;
    heads_and_dims();
    p_.heads_kv = p_.heads_q;
    p_.seqlen_q = random_.chance(0.1) ? 0 : random_.between(1, 40);
    p_.kv.seqlen = p_.seqlen_q;
    if (random_.chance(0.4)) {
      p_.q_layout = Layout::varlen;
      p_.total_q = p_.batch * p_.seqlen_q;
    }
    p_.parts = random_.chance(0.3) ? 2 : random_.between(1, 7);
    p_.sink = random_.chance(0.5);
    p_.lse = random_.chance(0.6);
  }

  void kv_append() {
    p_.operation = Operation::kv_append;
    heads_and_dims();
    query_sizes(random_.between(0, 20));
    p_.kv.seqlen = p_.seqlen_q + random_.between(0, 60);
    static constexpr KvLayout kLayouts[] = {KvLayout::dense, KvLayout::paged_table, KvLayout::paged_csr};
    p_.kv.layout = random_.pick(kLayouts);
    p_.kv.seqused = true;
    for (std::int64_t b = 0; b < p_.batch; ++b) v_.lens_k.push_back(random_.between(0, p_.kv.seqlen - p_.seqlen_q));
    if (p_.kv.layout != KvLayout::dense) {
      p_.kv.page_size = page_size();
      p_.kv.pages = p_.batch * ((p_.kv.seqlen + p_.kv.page_size - 1) / p_.kv.page_size) + random_.between(0, 3);
      v_.shuffled_pages = random_.chance(0.5);
    }
    if (random_.chance(0.7)) {
      p_.rotary = random_.chance(0.5) ? Rotary::half : Rotary::interleaved;
      p_.rotary_dim = random_.chance(0.5) ? p_.head_dim_qk : 2 * random_.between(1, p_.head_dim_qk / 2);
    }
    v_.rotate_q = random_.chance(0.5);
  }

  void linear_decode() {
    p_.operation = Operation::linear_decode;
    p_.batch = random_.between(1, 4);
    p_.seqlen_q = random_.chance(0.4) ? 1 : random_.between(2, 8);
    p_.heads_q = p_.heads_kv = random_.between(1, 3);
    static constexpr std::int64_t kGpuDims[] = {64, 128, 128, 256};
    p_.head_dim_qk = gpu_ ? chooser_.pick(kGpuDims) : head_dim();
    p_.head_dim_v = chooser_.chance(0.6) ? p_.head_dim_qk : gpu_ ? chooser_.pick(kGpuDims) : head_dim();
    if (chooser_.chance(0.4)) p_.state_type = DType::bf16;
    if (chooser_.chance(0.5)) p_.state_layout = StateLayout::kv;
    if (random_.chance(0.4)) p_.scale = static_cast<float>(random_.between(1, 200)) / 100.0F;
    p_.deterministic = random_.chance(0.2);
    p_.batch_invariant = random_.chance(0.2);
    if (p_.state_type == DType::bf16 && chooser_.chance(0.5)) {
      p_.rounding = Rounding::stochastic;
      seeds();
    }
    const bool ring = chooser_.chance(0.4);
    state_slots(!ring && random_.chance(0.4));
    v_.no_decay = random_.chance(0.4);
    if (!ring) return;
    p_.ring = random_.between(p_.seqlen_q, gpu_ ? 64 : 20);
    if (random_.chance(0.4)) p_.seqlen_q = 0;
  }

  void linear_chunk() {
    p_.operation = Operation::linear_chunk;
    p_.pass = random_.chance(0.5) ? Pass::backward : Pass::forward;
    p_.batch = random_.between(1, 3);
    p_.heads_q = p_.heads_kv = random_.between(1, 3);
    static constexpr std::int64_t kGpuDims[] = {64, 128, 128, 256};
    p_.head_dim_qk = gpu_ ? chooser_.pick(kGpuDims) : head_dim();
    p_.head_dim_v = chooser_.chance(0.6) ? p_.head_dim_qk : gpu_ ? chooser_.pick(kGpuDims) : head_dim();
    p_.seqlen_q = random_.chance(0.2) ? random_.between(0, 3) : random_.between(4, gpu_ ? 300 : 200);
    if (random_.chance(0.4)) {
      p_.q_layout = Layout::varlen;
      for (std::int64_t b = 0; b < p_.batch; ++b) v_.lens_q.push_back(length(p_.seqlen_q, b == 0));
      p_.total_q = std::accumulate(v_.lens_q.begin(), v_.lens_q.end(), random_.between(0, 5));
    }
    if (random_.chance(0.4)) p_.scale = static_cast<float>(random_.between(1, 200)) / 100.0F;
    p_.deterministic = random_.chance(0.4);
    p_.batch_invariant = random_.chance(0.2);
    v_.no_decay = random_.chance(0.3);
    const bool pool = chooser_.chance(0.7);
    if (chooser_.chance(0.4) && pool) p_.state_type = DType::bf16;
    if (random_.chance(0.5)) p_.state_layout = StateLayout::kv;
    if (!pool) return;
    state_slots(p_.pass == Pass::forward && random_.chance(0.5));
    v_.unbound_gradients = p_.pass == Pass::backward && random_.chance(0.3);
  }

  /// A pool, and slots of the sequences in it.
  void state_slots(bool elsewhere) {
    p_.slots = 2 * p_.batch + random_.between(0, 3);
    std::vector<std::int64_t> slots(static_cast<std::size_t>(p_.slots));
    std::iota(slots.begin(), slots.end(), 0);
    for (std::size_t i = slots.size() - 1; i > 0; --i) {
      std::swap(slots[i], slots[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(i) + 1))]);
    }
    const auto next = [&] {
      const std::int64_t slot = slots.back();
      slots.pop_back();
      return random_.chance(0.2) ? -random_.between(1, 3) : slot;
    };
    for (std::int64_t b = 0; b < p_.batch; ++b) v_.state_slots.push_back(next());
    for (std::int64_t b = 0; elsewhere && b < p_.batch; ++b) v_.dest_slots.push_back(next());
    v_.long_slots = random_.chance(0.4);
  }

  std::int64_t page_size() {
    static constexpr std::int64_t kSizes[] = {1, 2, 7, 8, 16, 16, 24, 32, 64};
    return random_.pick(kSizes);
  }

  std::int64_t length(std::int64_t longest, bool full) {
    if (full) return longest;
    return random_.chance(0.12) ? 0 : random_.between(0, longest);
  }

  /// Layout and lengths of the queries; the first sequence is full where the case is to span tiles.
  void query_sizes(std::int64_t longest) {
    p_.seqlen_q = longest;
    const bool varlen = random_.chance(0.33);
    p_.seqused_q = random_.chance(0.2);
    if (varlen) {
      p_.q_layout = Layout::varlen;
      for (std::int64_t b = 0; b < p_.batch; ++b) v_.lens_q.push_back(length(longest, b == 0));
      p_.total_q = std::accumulate(v_.lens_q.begin(), v_.lens_q.end(), random_.between(0, 5));
    }
    if (!p_.seqused_q) return;
    std::vector<std::int64_t>& used = varlen ? v_.used_q : v_.lens_q;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      const std::int64_t most = varlen ? v_.lens_q[static_cast<std::size_t>(b)] : longest;
      used.push_back(b == 0 && p_.batch > 1 ? most : length(most, random_.chance(0.3)));
    }
  }

  void key_sizes(KvSource& source, std::int64_t longest, std::vector<std::int64_t>& lens,
                 std::vector<std::int64_t>& used) {
    source.seqlen = longest;
    const double paged = p_.pass == Pass::forward ? 0.4 : 0.0;
    if (chooser_.chance(paged)) {
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
    p_.pass = !gpu_ && random_.chance(0.48) ? Pass::backward : Pass::forward;
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
    band();
    scores();
    tiles();
    outputs();
    make_extreme(case_, random_);
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

  void band() {
    const std::int64_t kind = random_.below(100);
    if (kind < 25) {
      p_.band.right = 0;
    } else if (kind < 43) {
      if (random_.chance(0.75)) p_.band.left = random_.between(0, 50);
      if (!p_.band.left || random_.chance(0.6)) p_.band.right = random_.between(0, 30);
    } else if (kind < 52) {
      if (random_.chance(0.5)) {
        p_.band.right = -random_.between(1, 12);
        if (random_.chance(0.5)) p_.band.left = random_.between(12, 50);
      } else {
        p_.band.left = -random_.between(1, 12);
        if (random_.chance(0.5)) p_.band.right = random_.between(12, 50);
      }
    }
    if (random_.chance(0.1)) p_.affine = AffineCausal{random_.between(1, 32), random_.between(1, 8)};
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

  void seeds() {
    v_.drop_seed = random_.bits();
    v_.drop_offset = random_.chance(0.5) ? random_.bits() : random_.bits() >> 48;
    v_.drop_scalars = random_.chance(0.4);
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

  void outputs() {
    const bool forward = p_.pass == Pass::forward;
    if (forward) {
      p_.lse = random_.chance(0.6);
    } else {
      p_.dlse = random_.chance(0.25);
      p_.grad_fp32 = random_.chance(0.35);
      p_.accumulate = p_.grad_fp32 && random_.chance(0.5);
    }
    p_.deterministic = random_.chance(0.2);
    p_.batch_invariant = random_.chance(0.2);
    // Those need a row's keys in one part. A backward's dQ is added over as many.
    const bool whole = p_.batch_invariant || p_.next != TileList::Form::none || p_.mass != MassKind::none;
    if (!whole && random_.chance(forward ? 0.4 : 0.3)) case_.wishes.splits = random_.between(2, 4);
  }

  RandomNumbers random_;
  RandomNumbers kernel_{0, 0};
  RandomNumbers& chooser_;  // of what is compiled into kernels; on the CPU nothing is, and it is random_
  bool gpu_ = false;
  Case case_;
  Problem& p_;
  Values& v_;
};

}  // namespace

Case random_case(std::uint64_t seed, std::uint64_t index, const std::vector<std::string>& isas) {
  return Generator(seed, index, isas).generate();
}

Case random_gpu_case(std::uint64_t seed, std::uint64_t index) { return Generator(seed, index).generate(); }

}  // namespace tessera::cases
