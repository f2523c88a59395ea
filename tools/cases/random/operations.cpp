// SPDX-License-Identifier: Apache-2.0
// Random cases of the operations beside attention.
#include <numeric>
#include <utility>

#include "cases/random/draw.h"

namespace tessera::cases {

void RandomDraw::combine() {
  p_.operation = Operation::combine;
  heads_and_dims();
  p_.heads_kv = p_.heads_q;
  p_.seqlen_q = random_.chance(0.1) ? 0 : random_.between(1, 40);
  p_.kv.seqlen = p_.seqlen_q;
  if (random_.chance(0.4)) {
    p_.q_layout = Layout::varlen;
    p_.total_q = p_.batch * p_.seqlen_q;
  }
  p_.combine.parts = random_.chance(0.3) ? 2 : random_.between(1, 7);
  p_.sink = random_.chance(0.5);
  p_.lse = random_.chance(0.6);
}

void RandomDraw::kv_append() {
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
    p_.append.rotary = random_.chance(0.5) ? Rotary::half : Rotary::interleaved;
    p_.append.rotary_dim = random_.chance(0.5) ? p_.head_dim_qk : 2 * random_.between(1, p_.head_dim_qk / 2);
  }
  v_.rotate_q = random_.chance(0.5);
}

void RandomDraw::linear_decode() {
  p_.operation = Operation::linear_decode;
  p_.batch = random_.between(1, 4);
  p_.seqlen_q = random_.chance(0.4) ? 1 : random_.between(2, 8);
  p_.heads_q = p_.heads_kv = random_.between(1, 3);
  static constexpr std::int64_t kGpuDims[] = {64, 128, 128, 256};
  p_.head_dim_qk = gpu_ ? chooser_.pick(kGpuDims) : head_dim();
  p_.head_dim_v = chooser_.chance(0.6) ? p_.head_dim_qk : gpu_ ? chooser_.pick(kGpuDims) : head_dim();
  if (chooser_.chance(0.4)) p_.linear.state_type = DType::bf16;
  if (chooser_.chance(0.5)) p_.linear.state_layout = StateLayout::kv;
  if (random_.chance(0.4)) p_.scale = static_cast<float>(random_.between(1, 200)) / 100.0F;
  p_.deterministic = random_.chance(0.2);
  p_.batch_invariant = random_.chance(0.2);
  if (p_.linear.state_type == DType::bf16 && chooser_.chance(0.5)) {
    p_.linear.rounding = Rounding::stochastic;
    seeds();
  }
  const bool ring = chooser_.chance(0.4);
  state_slots(!ring && random_.chance(0.4));
  v_.no_decay = random_.chance(0.4);
  if (!ring) return;
  p_.linear.ring = random_.between(p_.seqlen_q, gpu_ ? 64 : 20);
  if (random_.chance(0.4)) p_.seqlen_q = 0;
}

void RandomDraw::linear_chunk() {
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
  if (chooser_.chance(0.4) && pool) p_.linear.state_type = DType::bf16;
  if (random_.chance(0.5)) p_.linear.state_layout = StateLayout::kv;
  if (!pool) return;
  state_slots(p_.pass == Pass::forward && random_.chance(0.5));
  v_.unbound_gradients = p_.pass == Pass::backward && random_.chance(0.3);
}

void RandomDraw::key_tokens() {
  p_.kv.seqlen = random_.chance(0.1) ? random_.between(0, 3) : random_.between(4, 150);
  static constexpr std::int64_t kLengths[] = {1, 4, 5, 8, 16, 24, 32, 64};
  p_.nsa.length = random_.chance(0.7) ? random_.pick(kLengths) : random_.between(1, 40);
  p_.nsa.stride = random_.chance(0.5) ? p_.nsa.length : random_.between(1, p_.nsa.length);
  if (!random_.chance(0.4)) return;
  p_.kv.layout = KvLayout::varlen;
  for (std::int64_t b = 0; b < p_.batch; ++b) v_.lens_k.push_back(length(p_.kv.seqlen, b == 0));
  p_.kv.total = std::accumulate(v_.lens_k.begin(), v_.lens_k.end(), random_.between(0, 5));
}

void RandomDraw::nsa_pool() {
  p_.operation = Operation::nsa_pool;
  p_.pass = random_.chance(0.5) ? Pass::backward : Pass::forward;
  heads_and_dims();
  p_.heads_q = p_.heads_kv;
  key_tokens();
  p_.nsa.project = random_.chance(0.4);
  p_.deterministic = random_.chance(0.2);
  p_.batch_invariant = random_.chance(0.2);
}

void RandomDraw::nsa_select() {
  p_.operation = Operation::nsa_select;
  heads_and_dims();
  p_.head_dim_v = p_.head_dim_qk;
  key_tokens();
  Nsa& nsa = p_.nsa;
  if (random_.chance(0.5)) {
    nsa.score = SelectScore::softmax;
    static constexpr std::int64_t kStrides[] = {1, 2, 4, 8, 16};
    nsa.stride = random_.pick(kStrides);
    nsa.length = nsa.stride * random_.between(1, 4);
    nsa.block = nsa.stride * random_.between(1, 6);
  } else {
    nsa.stride = nsa.block = nsa.length;
  }
  static constexpr std::int64_t kTiles[] = {1, 1, 2, 8, 16, 32, 40, 256};
  nsa.tile = random_.pick(kTiles);
  nsa.query_heads = random_.chance(0.4);
  static constexpr TileReduce kReductions[] = {TileReduce::first, TileReduce::mean, TileReduce::max};
  nsa.reduce = random_.pick(kReductions);
  if (random_.chance(0.3)) nsa.visible = BlockVisible::started;
  nsa.initial = random_.between(0, 2);
  nsa.local = random_.between(0, 3);
  nsa.causal = random_.chance(0.7);
  nsa.top = nsa.initial + nsa.local + nsa.tile / nsa.block + 1 + random_.between(0, 10);
  if (random_.chance(0.5)) {
    static constexpr std::int64_t kKeys[] = {1, 2, 3, 4, 8, 20, 64};
    nsa.compressed_block = random_.pick(kKeys);
    nsa.compressed_top = (nsa.tile / nsa.stride + 1) / nsa.compressed_block + 2 + random_.between(0, 6);
  }
  p_.seqlen_q = random_.chance(0.7) ? p_.kv.seqlen : random_.between(0, 90);
  if (random_.chance(p_.kv.layout == KvLayout::varlen ? 0.8 : 0.2)) {
    p_.q_layout = Layout::varlen;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      const bool alike = p_.kv.layout == KvLayout::varlen && p_.seqlen_q == p_.kv.seqlen && random_.chance(0.8);
      v_.lens_q.push_back(alike ? v_.lens_k[static_cast<std::size_t>(b)] : length(p_.seqlen_q, b == 0));
    }
    p_.total_q = std::accumulate(v_.lens_q.begin(), v_.lens_q.end(), random_.between(0, 5));
  }
  if (random_.chance(0.3)) p_.scale = static_cast<float>(random_.between(-100, 200)) / 100.0F;
  if (random_.chance(0.25)) {
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      v_.q_offset.push_back(nsa.tile * random_.between(0, p_.kv.seqlen / nsa.tile + 1));
    }
  }
  p_.batch_invariant = random_.chance(0.2);
}

void RandomDraw::nsa_gate() {
  p_.operation = Operation::nsa_gate;
  p_.pass = random_.chance(0.5) ? Pass::backward : Pass::forward;
  heads_and_dims();
  p_.heads_kv = p_.heads_q;
  static constexpr GateKind kGates[] = {GateKind::sigmoid, GateKind::sigmoid, GateKind::given, GateKind::mean};
  p_.nsa.gate = random_.pick(kGates);
  p_.seqlen_q = random_.chance(0.1) ? 0 : random_.between(1, 90);
  p_.kv.seqlen = p_.seqlen_q;
  if (random_.chance(0.4)) {
    p_.q_layout = Layout::varlen;
    for (std::int64_t b = 0; b < p_.batch; ++b) v_.lens_q.push_back(length(p_.seqlen_q, b == 0));
    p_.total_q = std::accumulate(v_.lens_q.begin(), v_.lens_q.end(), random_.between(0, 5));
  }
  p_.deterministic = random_.chance(0.2);
  p_.batch_invariant = random_.chance(0.2);
}

void RandomDraw::grain(RandomNumbers& random) {
  static constexpr std::int64_t kBlocks[] = {1, 4, 16, 32, 64, 100};
  static constexpr Grain kGrains[] = {Grain::head, Grain::block, Grain::token};
  p_.quantization.grain = random.pick(kGrains);
  if (p_.quantization.grain == Grain::block) p_.quantization.block = random.pick(kBlocks);
}

void RandomDraw::quantize() {
  p_.operation = Operation::quantize;
  static constexpr DType kTypes[] = {DType::e4m3, DType::e4m3, DType::int8, DType::e5m2};
  heads_and_dims();
  p_.head_dim_v = p_.head_dim_qk;
  p_.k_type = p_.v_type = p_.q_type;
  p_.o_type = random_.pick(kTypes);
  query_sizes(random_.chance(0.1) ? 0 : random_.between(1, 100));
  grain(random_);
  Quantization& q = p_.quantization;
  q.smooth = p_.group() == 1 && random_.chance(0.4);
  q.hadamard = random_.chance(0.4);
  q.given = random_.chance(0.25);
  q.counts = random_.chance(0.5);
  if (q.hadamard) seeds();
  if (p_.seqlen_q > 0 && random_.chance(0.1)) v_.non_finite.push_back(random_.below(p_.seqlen_q));
}

void RandomDraw::eight_bits() {
  RandomNumbers random(v_.seed, 8);  // of its own: other problems stay as they are
  RandomNumbers& chooser = gpu_ ? chooser_ : random;
  if (p_.pass != Pass::forward || !chooser.chance(0.15)) return;
  if (gpu_) {
    types_of_gpu_bytes(chooser);
  } else {
    types_of_eight_bits(random);
  }
  if (!gpu_ || p_.k_type == DType::int8) {  // GPUs have no other descales of fp8 than by head
    if (!p_.kv2) grain(chooser);
    Quantization& q = p_.quantization;
    if (q.grain == Grain::block && p_.kv.page_size % q.block != 0) q.block = p_.kv.page_size;
    q.smooth = chooser.chance(0.3);
  }
  if (v_.inputs.kind != InputKind::Kind::nan_tail) v_.inputs = {};
  if (p_.k_type == DType::int8) v_.non_finite.clear();
}

// Scores of int8 beside values of 16 bits, or keys and values of fp8 under queries of 16 bits or of e4m3.
void RandomDraw::types_of_gpu_bytes(RandomNumbers& random) {
  static constexpr DType kFloats[] = {DType::e4m3, DType::e4m3, DType::e5m2};
  const bool masses = p_.mass != MassKind::none || p_.next != TileList::Form::none || p_.skip;  // int8 alone has any
  const std::int64_t kind = masses ? 0 : random.below(p_.list ? 3 : 4);
  p_.head_dim_qk = (p_.head_dim_qk + 15) / 16 * 16;
  if (v_.strides == Strides::gaps) v_.strides = Strides::packed;  // rows begin at multiples of 16 bytes
  if (kind < 2) {
    p_.q_type = p_.k_type = DType::int8;
    return;
  }
  p_.head_dim_v = (p_.head_dim_v + 15) / 16 * 16;
  if (kind == 2) {
    p_.q_type = p_.k_type = p_.v_type = DType::e4m3;
  } else {
    p_.k_type = random.pick(kFloats);
    p_.v_type = random.pick(kFloats);
  }
}

void RandomDraw::types_of_eight_bits(RandomNumbers& random) {
  static constexpr DType kFloats[] = {DType::e4m3, DType::e4m3, DType::e5m2};
  static constexpr DType kWide[] = {DType::fp32, DType::fp16, DType::bf16};
  const std::int64_t kind = random.below(3);
  if (kind == 0) {
    p_.q_type = p_.k_type = DType::e4m3;
    p_.v_type = random.pick(kFloats);
  } else if (kind == 1) {
    p_.q_type = p_.k_type = DType::int8;
    p_.v_type = random.chance(0.3) ? random.pick(kFloats) : random.pick(kWide);
  } else {
    p_.q_type = random.pick(kWide);
    p_.k_type = random.pick(kFloats);
    p_.v_type = random.pick(kFloats);
  }
}

void RandomDraw::state_slots(bool elsewhere) {
  p_.linear.states = 2 * p_.batch + random_.between(0, 3);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(p_.linear.states));
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

}  // namespace tessera::cases
