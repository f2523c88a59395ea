// SPDX-License-Identifier: Apache-2.0
// The problem line of problems drawn at random, and of lines with bytes changed.
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <random>
#include <string>

#include "tessera/error.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

/// A problem with every field drawn at random, some of them inconsistent; the caller keeps those that check() accepts.
class RandomProblem {
 public:
  explicit RandomProblem(std::uint64_t seed) : random_(seed) {}

  Problem draw() {
    Problem p;
    p.operation = pick({Operation::attention, Operation::attention, Operation::combine, Operation::kv_append,
                        Operation::linear_decode, Operation::linear_chunk, Operation::nsa_pool, Operation::nsa_select,
                        Operation::nsa_gate, Operation::quantize});
    const bool attention = p.operation == Operation::attention;
    if (p.is_linear()) return linear(p);
    if (p.operation == Operation::nsa_pool) return nsa(p);
    if (p.operation == Operation::quantize) return quantize(p);
    if (p.operation == Operation::nsa_select || p.operation == Operation::nsa_gate) return nsa_of_queries(p);
    p.batch = below(5);
    p.seqlen_q = below(300);
    p.heads_kv = 1 + below(4);
    p.heads_q = p.heads_kv * (1 + below(4));
    p.head_dim_qk = 8 * (1 + below(32));
    p.head_dim_v = rarely() ? 8 * (1 + below(32)) : p.head_dim_qk;
    p.q_type = float_type();
    p.k_type = rarely() ? float_type() : p.q_type;
    p.v_type = rarely() ? float_type() : p.q_type;
    p.o_type = rarely() ? float_type() : p.q_type;
    p.q_layout = pick({Layout::dense, Layout::varlen});
    if (p.q_layout == Layout::varlen) p.total_q = rarely() ? below(1000) : p.batch * p.seqlen_q;
    p.kv.seqlen = rarely() ? p.seqlen_q : below(300);
    p.kv.seqused = p.operation == Operation::kv_append;
    if (p.operation != Operation::combine) source(p, p.kv);
    p.lse = p.operation != Operation::kv_append && coin();
    p.sink = p.operation != Operation::kv_append && coin();
    p.deterministic = coin();
    p.batch_invariant = coin();
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    if (p.operation == Operation::combine) p.combine.parts = 1 + below(9);
    if (p.operation == Operation::kv_append && coin()) {
      p.append.rotary = pick({Rotary::half, Rotary::interleaved});
      p.append.rotary_dim = 2 * (1 + below(p.head_dim_qk / 2));
    }
    if (attention) attention_fields(p);
    return p;
  }

 private:
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }
  bool coin() { return below(2) == 1; }
  bool rarely() { return below(4) == 0; }
  float number() { return std::ldexp(static_cast<float>(1 + below(1 << 20)), static_cast<int>(below(20)) - 30); }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[below(static_cast<std::int64_t>(of.size()))];
  }
  Problem linear(Problem p) {
    p.batch = below(5);
    if (p.operation == Operation::linear_chunk) {
      p.pass = pick({Pass::forward, Pass::backward});
      p.q_layout = pick({Layout::dense, Layout::varlen});
      if (p.q_layout == Layout::varlen) p.total_q = below(40);
    }
    p.seqlen_q = below(10);
    p.heads_q = p.heads_kv = 1 + below(6);
    p.head_dim_qk = 8 * (1 + below(32));
    p.head_dim_v = rarely() ? 8 * (1 + below(32)) : p.head_dim_qk;
    p.q_type = p.k_type = p.v_type = p.o_type = float_type();
    if (rarely()) p.v_type = float_type();
    p.linear.state_type = pick({DType::fp32, DType::bf16});
    p.linear.state_layout = pick({StateLayout::vk, StateLayout::kv});
    p.linear.states = rarely() ? p.batch : below(100);
    if (p.operation == Operation::linear_decode && coin()) p.linear.ring = 5 + below(60);
    if (p.linear.state_type == DType::bf16 && p.operation == Operation::linear_decode && coin()) {
      p.linear.rounding = Rounding::stochastic;
    }
    if (coin()) p.scale = number();
    p.deterministic = coin();
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    return p;
  }
  Problem nsa(Problem p) {
    p.pass = pick({Pass::forward, Pass::backward});
    p.batch = below(5);
    p.kv.seqlen = below(300);
    p.heads_q = p.heads_kv = 1 + below(4);
    p.head_dim_qk = 1 + below(512);
    p.head_dim_v = rarely() ? 1 + below(512) : p.head_dim_qk;
    p.q_type = p.k_type = p.v_type = p.o_type = float_type();
    if (rarely()) p.v_type = float_type();
    p.kv.layout = pick({KvLayout::dense, KvLayout::varlen});
    if (p.kv.layout == KvLayout::varlen) p.kv.total = rarely() ? below(1000) : p.batch * p.kv.seqlen;
    if (coin()) p.nsa.length = 1 + below(64);
    p.nsa.stride = coin() ? p.nsa.length : 1 + below(64);
    p.nsa.project = coin();
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    return p;
  }
  Problem nsa_of_queries(Problem p) {
    p.batch = below(5);
    p.seqlen_q = below(300);
    p.heads_kv = 1 + below(4);
    p.heads_q = p.heads_kv * (1 + below(4));
    p.q_type = p.k_type = p.v_type = p.o_type = float_type();
    p.q_layout = pick({Layout::dense, Layout::varlen});
    if (p.q_layout == Layout::varlen) p.total_q = rarely() ? below(1000) : p.batch * p.seqlen_q;
    p.kv.seqlen = rarely() ? below(300) : p.seqlen_q;
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    if (p.operation == Operation::nsa_gate) {
      p.pass = pick({Pass::forward, Pass::backward});
      p.nsa.gate = pick({GateKind::sigmoid, GateKind::given, GateKind::mean});
      return p;
    }
    p.kv.layout = pick({KvLayout::dense, KvLayout::varlen});
    if (p.kv.layout == KvLayout::varlen) p.kv.total = rarely() ? below(1000) : p.batch * p.kv.seqlen;
    p.nsa.length = p.nsa.stride = p.nsa.block = 1 + below(64);
    if (coin()) {
      p.nsa.score = SelectScore::softmax;
      p.nsa.length *= 1 + below(3);
      p.nsa.block *= 1 + below(3);
    }
    p.nsa.tile = rarely() ? 1 : 1 + below(300);
    p.nsa.query_heads = coin();
    p.nsa.reduce = pick({TileReduce::first, TileReduce::mean, TileReduce::max});
    p.nsa.visible = pick({BlockVisible::complete, BlockVisible::started});
    p.nsa.initial = below(3);
    p.nsa.local = below(3);
    p.nsa.causal = coin();
    p.nsa.top = 320 + below(30);
    if (coin()) {
      p.nsa.compressed_top = 320 + below(30);
      p.nsa.compressed_block = rarely() ? 64 : 1 + below(100);
    }
    if (coin()) p.scale = number();
    return p;
  }
  Problem quantize(Problem p) {
    p.batch = below(5);
    p.seqlen_q = below(300);
    p.heads_kv = 1 + below(4);
    p.heads_q = p.heads_kv * (1 + below(3));
    p.head_dim_qk = p.head_dim_v = 1 + below(512);
    p.q_type = p.k_type = p.v_type = pick({DType::fp32, DType::fp16, DType::bf16});
    p.o_type = pick({DType::e4m3, DType::e5m2, DType::int8});
    p.q_layout = pick({Layout::dense, Layout::varlen});
    if (p.q_layout == Layout::varlen) p.total_q = rarely() ? below(1000) : p.batch * p.seqlen_q;
    p.seqused_q = coin();
    descales(p);
    p.quantization.hadamard = coin();
    p.quantization.given = coin();
    p.quantization.counts = coin();
    p.metadata = pick({Metadata::trust, Metadata::clamp, Metadata::report});
    return p;
  }
  void descales(Problem& p) {
    p.quantization.grain = pick({Grain::head, Grain::block, Grain::token});
    if (p.quantization.grain == Grain::block) p.quantization.block = 1 + below(100);
    p.quantization.smooth = coin();
  }
  DType float_type() { return pick({DType::fp32, DType::fp16, DType::bf16}); }
  TileList list() {
    if (coin()) return {};
    return {pick({TileList::Form::indices, TileList::Form::bitmask, TileList::Form::transposed}),
            pick({TileList::Heads::one, TileList::Heads::kv, TileList::Heads::q}), coin(), coin()};
  }
  void source(const Problem& p, KvSource& kv) {
    kv.layout = pick({KvLayout::dense, KvLayout::varlen, KvLayout::paged_table, KvLayout::paged_csr});
    if (kv.layout == KvLayout::varlen) kv.total = rarely() ? below(1000) : p.batch * kv.seqlen;
    if (kv.layout == KvLayout::paged_table || kv.layout == KvLayout::paged_csr) {
      kv.page_size = 1 + below(70);
      kv.pages = rarely() ? below(100) : p.batch * ((kv.seqlen + kv.page_size - 1) / kv.page_size);
    }
    if (kv.layout == KvLayout::paged_table) kv.seqused = true;
    if ((kv.layout == KvLayout::dense || kv.layout == KvLayout::varlen) && coin()) kv.seqused = true;
  }
  void attention_fields(Problem& p) {
    p.seqused_q = coin();
    if (coin()) {
      p.kv2.emplace();
      p.kv2->seqlen = below(300);
      source(p, *p.kv2);
    }
    if (rarely()) {
      p.q_type = p.k_type = p.v_type = pick({DType::e4m3, DType::int8});
      if (p.k_type == DType::int8 || coin()) p.v_type = DType::e5m2;
      p.o_type = DType::bf16;
      descales(p);
    }
    if (coin()) p.scale = number();
    if (coin()) p.softcap = number();
    p.alibi = coin();
    p.score = pick({"", "", "relative", "my.score-2"});
    p.mask = pick({"", "", "document", "user/mask:7"});
    if (coin()) p.window.left = below(200) - 100;
    if (coin()) p.window.right = below(200) - 100;
    if (rarely()) p.window = {std::nullopt, 0};
    if (rarely()) p.compressed_causal = CompressedCausal{1 + below(64), 1 + below(64)};
    if (rarely()) p.chunk = 1 + below(64);
    if (coin()) p.dropout = static_cast<float>(below(1000)) / 1000.0F;
    if (coin()) p.block_q = 1 + below(200);
    if (coin()) p.block_kv = 1 + below(200);
    p.list = list();
    p.residual = p.o_type != DType::fp32 && coin();
    if (coin()) {
      p.pass = Pass::backward;
      p.bwd_list = list();
      p.dlse = coin();
      p.grad_fp32 = coin();
      p.accumulate = p.grad_fp32 && coin();
    }
    p.next = pick({TileList::Form::none, TileList::Form::indices, TileList::Form::bitmask});
    if (p.next != TileList::Form::none && coin()) p.next_threshold = number();
    p.mass = pick({MassKind::none, MassKind::mean, MassKind::rms});
    if (rarely()) {
      p.list = {.form = TileList::Form::bitmask};
      p.skip.kind = pick({SkipRule::Kind::mass, SkipRule::Kind::threshold});
      if (p.skip.kind == SkipRule::Kind::mass) p.skip = {p.skip.kind, coin(), below(256)};
      p.next = TileList::Form::none;
      p.mass = MassKind::none;
      p.next_threshold = 0.0F;
    }
    p.mass_prior_lse = (p.mass != MassKind::none || p.next != TileList::Form::none) && coin();
  }

  std::mt19937_64 random_;
};

TEST(RandomGrammar, RandomProblemsRoundTrip) {
  RandomProblem random(20240917);
  int kept = 0;
  for (int i = 0; i < 30000; ++i) {
    const Problem p = random.draw();
    try {
      p.check();
    } catch (const Error&) {
      continue;
    }
    ++kept;
    const std::string line = p.to_string();
    const Problem back = Problem::parse(line);
    ASSERT_TRUE(back == p) << line;
    ASSERT_EQ(back.to_string(), line);
  }
  EXPECT_GT(kept, 15000);
}

/// Bytes thrown at the grammar: anything but an Error or a problem that round-trips is a defect.
TEST(RandomGrammar, MutatedLinesParseOrThrow) {
  RandomProblem problems(7);
  std::mt19937_64 random(8);
  const std::string alphabet = "=:x*- 0189abkqs\t\xff";
  int parsed = 0;
  for (int i = 0; i < 30000; ++i) {
    std::string line = problems.draw().to_string();
    for (std::uint64_t edits = random() % 3; edits > 0; --edits) {
      line[random() % line.size()] = alphabet[random() % alphabet.size()];
    }
    try {
      const Problem p = Problem::parse(line);
      ASSERT_TRUE(Problem::parse(p.to_string()) == p) << line;
      ++parsed;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(parsed, 5000);
}

}  // namespace
}  // namespace tessera
