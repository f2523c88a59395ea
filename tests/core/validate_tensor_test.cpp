// SPDX-License-Identifier: Apache-2.0
// Bindings that are wrong by presence, type, shape, strides, memory or callable.
#include <cmath>
#include <limits>

#include "bad_call.h"

namespace tessera {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
const char* const kDense = "attention b=2 sq=8 hq=4 hkv=2 d=16";
const char* const kBackward = "attention pass=backward b=2 sq=8 hq=4 hkv=2 d=16";
const char* const kVarlen = "attention b=2 sq=8 hq=4 hkv=2 d=16 layout=varlen";
const char* const kPaged = "attention b=2 sq=2 sk=8 d=16 kv=table page=4";
const char* const kCombine = "combine b=2 sq=8 hq=2 d=16 parts=3 lse";
const char* const kAppend = "kv_append b=2 sq=2 sk=8 hq=2 d=16 rotary=half:8";

const char* const kLinear = "linear_decode b=2 t=3 h=2 d=16 slots=3";
const char* const kRing = "linear_decode b=2 t=3 h=2 d=16 slots=3 ring=4";
const char* const kChunk = "linear_chunk b=2 t=9 h=2 d=16";
const char* const kChunkBackward = "linear_chunk pass=backward b=2 t=9 h=2 d=16 slots=3";

double some_score(double score, const ScorePoint& /*at*/, void* /*user*/) { return score; }
bool some_mask(const ScorePoint& /*at*/, void* /*user*/) { return true; }
TileClass some_class(const TileBounds& /*tile*/, void* /*user*/) { return TileClass::partial; }

const BadCall kBadCalls[] = {
    {"q_unbound", kDense, [](Call& c) { c[Slot::q] = {}; }, kInvalid, "q"},
    {"k_unbound", kDense, [](Call& c) { c[Slot::k] = {}; }, kInvalid, "k"},
    {"o_unbound", kDense, [](Call& c) { c[Slot::o] = {}; }, kInvalid, "o"},
    {"lse_unbound", "attention sq=8 lse", [](Call& c) { c[Slot::lse] = {}; }, kInvalid, "lse"},
    {"backward_lse_unbound", kBackward, [](Call& c) { c[Slot::lse] = {}; }, kInvalid, "lse"},
    {"dq_unbound", kBackward, [](Call& c) { c[Slot::dq] = {}; }, kInvalid, "dq"},
    {"dout_unbound", kBackward, [](Call& c) { c[Slot::dout] = {}; }, kInvalid, "dout"},
    {"dsink_unbound", "attention pass=backward sq=8 sink", [](Call& c) { c[Slot::dsink] = {}; }, kInvalid, "dsink"},
    {"sink_unbound", "attention sq=8 sink", [](Call& c) { c[Slot::sink] = {}; }, kInvalid, "sink"},
    {"slopes_unbound", "attention sq=8 alibi", [](Call& c) { c[Slot::alibi_slopes] = {}; }, kInvalid, "alibi_slopes"},
    {"cu_seqlens_unbound", kVarlen, [](Call& c) { c[Slot::cu_seqlens_q] = {}; }, kInvalid, "cu_seqlens_q"},
    {"seqused_unbound", kPaged, [](Call& c) { c[Slot::seqused_k] = {}; }, kInvalid, "seqused_k"},
    {"table_unbound", kPaged, [](Call& c) { c[Slot::page_table] = {}; }, kInvalid, "page_table"},
    {"k2_unbound", "attention sq=8 kv2=dense sk2=4", [](Call& c) { c[Slot::k2] = {}; }, kInvalid, "k2"},
    {"prior_lse_unbound", "attention sq=8 mass=mean mass_lse=prior", [](Call& c) { c[Slot::prior_lse] = {}; }, kInvalid,
     "prior_lse"},
    {"rotary_unbound", kAppend, [](Call& c) { c[Slot::rotary_sin] = {}; }, kInvalid, "rotary_sin"},
    {"q_rotated_unbound", kAppend, [](Call& c) { c[Slot::q_rotated] = {}; }, kInvalid, "q_rotated"},
    {"append_q_unbound", kAppend, [](Call& c) { c[Slot::q] = {}; }, kInvalid, "q"},
    {"parts_unbound", kCombine, [](Call& c) { c[Slot::o_parts] = {}; }, kInvalid, "o_parts"},
    {"state_unbound", kLinear, [](Call& c) { c[Slot::state] = {}; }, kInvalid, "state"},
    {"decay_unbound", kLinear, [](Call& c) { c[Slot::decay_slopes] = {}; }, kInvalid, "decay_slopes"},
    {"too_few_states", "linear_decode b=3 slots=3",
     [](Call& c) {
       c.problem.linear.states = 2;
       c.bind(Slot::state, DType::fp32, {2, 1, 64, 64});
       c[Slot::state_slots] = {};
     },
     kInvalid, "state_slots"},
    {"state_other_layout", "linear_decode d=16 dv=32",
     [](Call& c) {
       c.bind(Slot::state, DType::fp32, {1, 1, 16, 32});
     },
     kInvalid, "state"},
    {"state_type", kLinear, [](Call& c) { c[Slot::state].dtype = DType::bf16; }, kInvalid, "state"},
    {"slots_type", kLinear, [](Call& c) { c[Slot::state_slots].dtype = DType::uint32; }, kInvalid, "state_slots"},
    {"rounding_seed_without_use", kLinear, [](Call& c) { c.bind(Slot::dropout_seed, DType::uint64, {1}); }, kInvalid,
     "dropout_seed"},
    {"offset_type", "linear_decode state=bf16 rounding=stochastic",
     [](Call& c) { c.bind(Slot::dropout_offset, {1}, {4}); }, kInvalid, "dropout_offset"},
    {"ring_k_unbound", kRing, [](Call& c) { c[Slot::ring_k] = {}; }, kInvalid, "ring_k"},
    {"ring_cursor_unbound", kRing, [](Call& c) { c[Slot::ring_cursor] = {}; }, kInvalid, "ring_cursor"},
    {"ring_of_one_half", kRing, [](Call& c) { c[Slot::ring_v].shape[2] = 4; }, kInvalid, "ring_v"},
    {"ring_type", kRing, [](Call& c) { c[Slot::ring_k].dtype = DType::bf16; }, kInvalid, "ring_k"},
    {"ring_is_state", kRing, [](Call& c) { c[Slot::ring_v].data = c[Slot::state].data; }, kInvalid, "ring_v"},
    {"cursor_type", kRing, [](Call& c) { c.bind(Slot::ring_cursor, DType::int64, {2}); }, kInvalid, "ring_cursor"},
    {"dest_with_ring", kRing,
     [](Call& c) {
       c.bind(Slot::dest_slots, {2}, {0, 1});
     },
     kInvalid, "dest_slots"},
    {"ring_without_use", kLinear,
     [](Call& c) {
       c.bind(Slot::ring_cursor, {2}, {0, 1});
     },
     kInvalid, "ring_cursor"},
    {"q_of_flush", "linear_decode t=0 ring=4",
     [](Call& c) {
       c.bind(Slot::q, DType::fp32, {1, 0, 1, 64});
     },
     kInvalid, "q"},
    {"o_is_v", kLinear, [](Call& c) { c[Slot::o].data = c[Slot::v].data; }, kInvalid, "o"},
    {"states_overlap", kLinear, [](Call& c) { c[Slot::state].strides[0] = 16; }, kInvalid, "state"},
    {"chunk_o_unbound", kChunk, [](Call& c) { c[Slot::o] = {}; }, kInvalid, "o"},
    {"chunk_state_without_slots", kChunk,
     [](Call& c) {
       c.bind(Slot::state, DType::fp32, {2, 2, 16, 16});
     },
     kInvalid, "state"},
    {"chunk_gradient_without_use", kChunk,
     [](Call& c) {
       c.bind(Slot::dstate_final, DType::fp32, {2, 2, 16, 16});
     },
     kInvalid, "dstate_final"},
    {"chunk_too_few_states", kChunkBackward,
     [](Call& c) {
       c.problem.linear.states = 1;
       c.bind(Slot::state, DType::fp32, {1, 2, 16, 16});
       c[Slot::state_slots] = {};
     },
     kInvalid, "state_slots"},
    {"chunk_dest_of_backward", kChunkBackward,
     [](Call& c) {
       c.bind(Slot::dest_slots, {2}, {0, 1});
     },
     kInvalid, "dest_slots"},
    {"chunk_o_of_backward", kChunkBackward, [](Call& c) { c[Slot::o] = c[Slot::dout]; }, kInvalid, "o"},
    {"chunk_dk_unbound", kChunkBackward, [](Call& c) { c[Slot::dk] = {}; }, kInvalid, "dk"},
    {"chunk_dq_is_dk", kChunkBackward, [](Call& c) { c[Slot::dq].data = c[Slot::dk].data; }, kInvalid, "dk"},
    {"chunk_dq_is_q", kChunkBackward, [](Call& c) { c[Slot::dq].data = c[Slot::q].data; }, kInvalid, "dq"},
    {"chunk_final_shape", kChunkBackward,
     [](Call& c) {
       c.bind(Slot::dstate_final, DType::fp32, {3, 2, 16, 16});
     },
     kInvalid, "dstate_final"},
    {"chunk_initial_type", kChunkBackward, [](Call& c) { c[Slot::dstate_initial].dtype = DType::bf16; }, kInvalid,
     "dstate_initial"},
    {"lse_without_use", kDense,
     [](Call& c) {
       c.bind(Slot::lse, DType::fp32, {2, 4, 8});
     },
     kInvalid, "lse"},
    {"dq_without_use", kDense,
     [](Call& c) {
       c.bind(Slot::dq, DType::fp32, {2, 8, 4, 16});
     },
     kInvalid, "dq"},
    {"seed_without_use", kDense, [](Call& c) { c.bind(Slot::dropout_seed, DType::uint64, {1}); }, kInvalid,
     "dropout_seed"},
    {"status_without_use", kDense, [](Call& c) { c.bind(Slot::status, {1}, {0}); }, kInvalid, "status"},
    {"offset_without_use", kCombine, [](Call& c) { c.bind(Slot::q_offset, DType::int64, {2}); }, kInvalid, "q_offset"},
    {"q_dtype", kDense, [](Call& c) { c[Slot::q].dtype = DType::bf16; }, kInvalid, "q"},
    {"gradient_dtype", "attention pass=backward sq=8 dtype=bf16 grad=fp32",
     [](Call& c) { c[Slot::dk].dtype = DType::bf16; }, kInvalid, "dk"},
    {"cu_seqlens_dtype", kVarlen, [](Call& c) { c[Slot::cu_seqlens_k].dtype = DType::int64; }, kInvalid,
     "cu_seqlens_k"},
    {"offset_dtype", kDense,
     [](Call& c) {
       c.bind(Slot::q_offset, {2}, {0, 0});
     },
     kInvalid, "q_offset"},
    {"k_new_dtype", kAppend, [](Call& c) { c[Slot::k_new].dtype = DType::int32; }, kInvalid, "k_new"},
    {"rotary_dtype", kAppend, [](Call& c) { c[Slot::rotary_cos].dtype = DType::bf16; }, kInvalid, "rotary_cos"},
    {"q_rank", kDense, [](Call& c) { c[Slot::q].rank = 3; }, kInvalid, "q"},
    {"q_rank_beyond_the_most", kDense, [](Call& c) { c[Slot::q].rank = 7; }, kInvalid, "q"},
    {"slopes_rank", "attention b=2 sq=8 hq=2 alibi",
     [](Call& c) {
       c.bind(Slot::alibi_slopes, DType::fp32, {1, 2, 2});
     },
     kInvalid, "alibi_slopes"},
    {"q_shape", kDense, [](Call& c) { c[Slot::q].shape[1] = 7; }, kInvalid, "q"},
    {"k_heads", kDense, [](Call& c) { c[Slot::k].shape[2] = 4; }, kInvalid, "k"},
    {"v_dim", kDense, [](Call& c) { c[Slot::v].shape[3] = 8; }, kInvalid, "v"},
    {"negative_size", kDense, [](Call& c) { c[Slot::q].shape[0] = -2; }, kInvalid, "q"},
    {"table_too_narrow", kPaged,
     [](Call& c) {
       c.bind(Slot::page_table, {2, 1}, {0, 1});
     },
     kInvalid, "page_table"},
    {"table_of_more_rows", kPaged,
     [](Call& c) {
       c.bind(Slot::page_table, {3, 2}, {0, 1, 2, 3, 0, 1});
     },
     kInvalid, "page_table"},
    {"device", kDense,
     [](Call& c) {
       c[Slot::k].device = {DeviceType::cuda, 0};
     },
     kInvalid, "k"},
    {"null_data", kDense, [](Call& c) { c[Slot::k].data = nullptr; }, kInvalid, "k"},
    {"negative_byte_offset", kDense, [](Call& c) { c[Slot::v].byte_offset = -4; }, kInvalid, "v"},
    {"q_last_stride", kDense, [](Call& c) { c[Slot::q].strides[3] = 2; }, kInvalid, "q"},
    {"misaligned", kDense, [](Call& c) { c[Slot::q].byte_offset = 2; }, kInvalid, "q"},
    {"misaligned_lengths", kVarlen, [](Call& c) { c[Slot::cu_seqlens_q].byte_offset = 1; }, kInvalid, "cu_seqlens_q"},
    {"stride_overflow", kDense, [](Call& c) { c[Slot::q].strides[0] = kMax; }, ErrorCode::overflow, "q"},
    {"stride_least", kDense, [](Call& c) { c[Slot::o].strides[0] = -kMax - 1; }, ErrorCode::overflow, "o"},
    {"stride_of_an_empty_tensor", "attention b=3 sq=8 sk=0 d=16", [](Call& c) { c[Slot::k].strides[0] = kMax / 8; },
     ErrorCode::overflow, "k"},
    {"stride_sum_overflow", kDense, [](Call& c) { c[Slot::q].strides[0] = c[Slot::q].strides[1] = kMax / 8; },
     ErrorCode::overflow, "q"},
    {"stride_product_overflow", kDense, [](Call& c) { c[Slot::q].strides[1] = kMax / 4; }, ErrorCode::overflow, "q"},
    {"address_below_zero", kDense, [](Call& c) { c[Slot::q].strides[0] = -(kMax >> 10); }, ErrorCode::overflow, "q"},
    {"broadcast_output", kDense, [](Call& c) { c[Slot::o].strides[0] = 0; }, kInvalid, "o"},
    {"self_overlapping_output", kDense, [](Call& c) { c[Slot::o].strides[1] = 32; }, kInvalid, "o"},
    {"o_is_q", kDense, [](Call& c) { c[Slot::o].data = c[Slot::q].data; }, kInvalid, "o"},
    {"o_inside_v", kDense, [](Call& c) { c[Slot::o].data = c[Slot::v].as<float>() + 100; }, kInvalid, "o"},
    {"dk_is_dv", kBackward, [](Call& c) { c[Slot::dv].data = c[Slot::dk].data; }, kInvalid, "dv"},
    {"dq_is_dout", kBackward, [](Call& c) { c[Slot::dq].data = c[Slot::dout].data; }, kInvalid, "dq"},
    {"lse_in_o", "attention b=1 sq=8 hq=4 d=16 lse", [](Call& c) { c[Slot::lse].data = c[Slot::o].data; }, kInvalid,
     "lse"},
    {"o_over_cu_seqlens", kVarlen, [](Call& c) { c[Slot::o].data = c[Slot::cu_seqlens_q].data; }, kInvalid, "o"},
    {"combine_o_is_part_1", kCombine,
     [](Call& c) { c[Slot::o].data = c[Slot::o_parts].as<float>() + c[Slot::o_parts].strides[0]; }, kInvalid, "o"},
    {"combine_o_shifted_in_part_0", kCombine, [](Call& c) { c[Slot::o].data = c[Slot::o_parts].as<float>() + 16; },
     kInvalid, "o"},
    {"combine_o_of_other_strides_in_part_0", kCombine,
     [](Call& c) {
       c[Slot::o].data = c[Slot::o_parts].data;
       std::swap(c[Slot::o].strides[1], c[Slot::o].strides[2]);
       c[Slot::o].strides[2] *= 4;
     },
     kInvalid, "o"},
    {"combine_lse_in_o_parts", kCombine, [](Call& c) { c[Slot::lse].data = c[Slot::o_parts].data; }, kInvalid, "lse"},
    {"append_k_is_k_new", "kv_append b=1 sq=2 sk=8 d=16", [](Call& c) { c[Slot::k_new].data = c[Slot::k].data; },
     kInvalid, "k"},
    {"score_unknown", "attention sq=8 score=relative", [](Call& c) { c.problem.score = "mine"; }, kInvalid, "score"},
    {"score_without_use", kDense, [](Call& c) { c.bindings.score.value = some_score; }, kInvalid, "score"},
    {"score_derivative_alone", "attention sq=8 score=relative",
     [](Call& c) { c.bindings.score.derivative = some_score; }, kInvalid, "score"},
    {"score_without_derivative", "attention pass=backward sq=8 score=relative",
     [](Call& c) { c.bindings.score.value = some_score; }, kInvalid, "score.derivative"},
    {"mask_unknown", "attention sq=8 mask=document", [](Call& c) { c.problem.mask = "mine"; }, kInvalid, "mask"},
    {"mask_without_use", kDense, [](Call& c) { c.bindings.mask.visible = some_mask; }, kInvalid, "mask"},
    {"classifier_alone", "attention sq=8 mask=document", [](Call& c) { c.bindings.mask.classify = some_class; },
     kInvalid, "mask"},
    {"batch_offset", kDense, [](Call& c) { c.bindings.batch_offset = kMax; }, ErrorCode::out_of_range, "batch_offset"},
    {"head_offset", kDense, [](Call& c) { c.bindings.head_offset = -kMax; }, ErrorCode::out_of_range, "head_offset"},
};

class TensorRefused : public testing::TestWithParam<BadCall> {};
TEST_P(TensorRefused, BeforeAnythingIsWritten) { expect_refused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Validate, TensorRefused, testing::ValuesIn(kBadCalls), bad_call_name);

/// The error for a slot without use says which word of the problem would use it.
TEST(Validate, NamesTheWordThatWouldUseASlot) {
  for (int i = 0; i < static_cast<int>(Slot::count_); ++i) {
    const auto slot = static_cast<Slot>(i);
    const bool attention_slot = slot == Slot::q || slot == Slot::k || slot == Slot::v || slot == Slot::o ||
                                slot == Slot::q_offset || slot == Slot::k_offset;
    Call call(attention_slot ? (slot == Slot::o ? "kv_append sq=2" : "combine sq=2") : "attention sq=2");
    if (slot == Slot::q) continue;  // of use in all three operations but combine, which the others cover
    call.bind(slot, DType::fp32, {1});
    try {
      call.run();
      ADD_FAILURE() << to_string(slot);
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), to_string(slot));
      EXPECT_NE(error.want().find("has no use for it, one with "), std::string::npos) << error.what();
      EXPECT_EQ(error.want().find("no problem"), std::string::npos) << error.what();
    }
  }
}

TEST(Validate, AcceptsWhatIsUnusualAndRight) {
  const auto good = [](const char* line, void (*change)(Call&)) {
    Call call(line);
    change(call);
    EXPECT_NO_THROW(call.run()) << line;
  };
  // Broadcast inputs, negative strides, a stride beside a size of 1.
  good(kDense, [](Call& c) { c[Slot::k].strides[0] = 0; });
  good(kDense, [](Call& c) {
    c[Slot::v].byte_offset = 7 * c[Slot::v].strides[1] * 4;
    c[Slot::v].strides[1] = -c[Slot::v].strides[1];
  });
  good("attention sq=8 d=16", [](Call& c) { c[Slot::o].strides[0] = 123457; });
  // (batch, heads, seqlen, dim) in memory.
  good(kDense, [](Call& c) {
    c[Slot::o].strides[1] = 16;
    c[Slot::o].strides[2] = 8 * 16;
  });
  // Strides that do not nest and still give every element an address of its own: 0, 3, 6 and 2, 5, 8.
  good("combine b=3 sq=2 hq=1 d=8", [](Call& c) {
    c[Slot::o].strides[0] = 24;
    c[Slot::o].strides[1] = 16;
  });
  // q, k, v and their gradients inside one (b, s, 3, h, d) buffer each.
  good("attention pass=backward b=2 sq=8 hq=2 d=16", [](Call& c) {
    for (const auto& [first, second, third] :
         {std::array{Slot::q, Slot::k, Slot::v}, std::array{Slot::dq, Slot::dk, Slot::dv}}) {
      std::byte* data = c.bind(first, DType::fp32, {2, 8, 3, 2, 16}).bytes();
      for (const Slot slot : {first, second, third}) {
        c[slot] = Tensor::strided(data, DType::fp32, {2, 8, 2, 16}, {768, 96, 16, 1});
        data += std::size_t{32} * 4;
      }
    }
  });
  good(kCombine, [](Call& c) {
    c[Slot::o].data = c[Slot::o_parts].data;
    c[Slot::lse].data = c[Slot::lse_parts].data;
  });
  // Tokens inside a packed (b, t, 3, h, d) tensor, states apart, slots as int64.
  good(kLinear, [](Call& c) {
    std::byte* data = c.bind(Slot::q, DType::fp32, {2, 3, 3, 2, 16}).bytes();
    for (const Slot slot : {Slot::q, Slot::k, Slot::v}) {
      c[slot] = Tensor::strided(data, DType::fp32, {2, 3, 2, 16}, {288, 96, 16, 1});
      data += std::size_t{32} * 4;
    }
    c.bind(Slot::state, DType::fp32, {3, 3, 16, 16});
    c[Slot::state].shape[1] = 2;
    c.bind(Slot::state_slots, DType::int64, {2}).as<std::int64_t>()[1] = 2;
  });
  good("attention b=2 sq=8 hq=2 alibi", [](Call& c) { c.bind(Slot::alibi_slopes, DType::fp32, {2, 2}); });
  good("attention sq=8 dropout=0.5", [](Call& c) {
    c.bind(Slot::dropout_seed, DType::uint64, {1});
    c.bind(Slot::dropout_offset, DType::uint64, {1});
  });
  good("attention sq=8 metadata=report", [](Call& c) { c.bind(Slot::status, {1}, {0}); });
  good("attention sq=8 score=mine mask=mine", [](Call& c) {
    c.bindings.score.value = some_score;
    c.bindings.mask = {some_mask, some_class, nullptr};
  });
  good("kv_append b=2 sq=2 sk=8 d=16 dtype=bf16 rotary=half:8", [](Call& c) {
    c.bind(Slot::rotary_cos, DType::bf16, {8, 4});
  });
  good(kPaged, [](Call& c) { c.bind(Slot::page_table, {2, 3}, {0, 1, -5, 2, 3, 999}); });
}

/// Every bound tensor's elements after a run, fp32 inputs filled; `change` may alter strides.
std::vector<std::vector<std::byte>> results(const char* line, void (*change)(Tensor&)) {
  Call call(line);
  for (Tensor& tensor : call.bindings.tensors) {
    if (!tensor || tensor.dtype != DType::fp32) continue;
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.as<float>()[i] = static_cast<float>(i % 7) * 0.25F;
  }
  for (Tensor& tensor : call.bindings.tensors) change(tensor);
  call.run();
  std::vector<std::vector<std::byte>> bytes;
  for (const Tensor& tensor : call.bindings.tensors) {
    if (!tensor) continue;
    const auto count = static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype);
    bytes.emplace_back(tensor.bytes(), tensor.bytes() + count);
  }
  return bytes;
}

TEST(Validate, StridesOfOneElementMeanNothing) {
  for (const char* line :
       {"attention sq=1 d=16 lse alibi sink mass=mean next=indices list=indices",
        "attention sq=1 sk=300 hq=2 hkv=1 d=16", "attention sq=100 sk=1 d=16", "attention sq=1 sk=5 d=16 layout=varlen",
        "attention sq=3 sk=2 d=16 kv=table page=1", "attention sq=1 sk=1 d=16 kv=csr page=1",
        "attention pass=backward sq=1 d=16 sink dlse", "attention sq=2 d=16 dtype=bf16 residual",
        "attention pass=backward sq=2 d=16 dtype=fp16 residual", "attention pass=backward sq=1 sk=90 hq=2 hkv=1 d=16",
        "combine sq=1 d=16 parts=1 lse", "kv_append sq=1 sk=2 d=16 rotary=half:8", "linear_decode t=1 h=1 d=16",
        "linear_decode t=1 h=1 d=16 ring=4", "linear_chunk t=1 h=1 d=16 slots=1",
        "linear_chunk pass=backward t=1 h=1 d=16 slots=1"}) {
    const auto want = results(line, [](Tensor&) {});
    for (auto* change : {+[](Tensor& tensor) {
                           for (std::size_t i = 0; i < Tensor::kMaxRank; ++i) {
                             if (tensor.shape[i] == 1) tensor.strides[i] = kMax - 1;
                           }
                         },
                         +[](Tensor& tensor) {
                           for (std::size_t i = 0; i < Tensor::kMaxRank; ++i) {
                             if (tensor.shape[i] == 1) tensor.strides[i] = -kMax - 1;
                           }
                         }}) {
      EXPECT_TRUE(results(line, change) == want) << line;
    }
  }
}

TEST(Validate, SelfOverlapIsExact) {
  // 5 rows 2 apart of 3 elements meet; 5 rows 3 apart do not.
  Call call("combine b=5 sq=3 hq=1 d=1 dv=1 parts=1");
  call[Slot::o].strides = {3, 1, 1, 1, 0, 0};
  EXPECT_NO_THROW(call.run());
  call[Slot::o].strides = {2, 1, 1, 1, 0, 0};
  expect_error([&] { call.run(); }, kInvalid, "o");
  // 0, 7, 14, … and 0, 5, 10 first meet at 35 = 5·7: with 5 rows they do not, with 6 rows and 8 columns they do.
  call[Slot::o].strides = {7, 5, 1, 1, 0, 0};
  EXPECT_NO_THROW(call.run());
  Call meets("combine b=6 sq=8 hq=1 d=1 dv=1 parts=1");
  meets[Slot::o].strides = {7, 5, 1, 1, 0, 0};
  expect_error([&] { meets.run(); }, kInvalid, "o");
  // Two equal strides meet at once, but the longest one is tried first, by more steps than the search makes.
  Call many("combine b=60 sq=60 hq=60 d=2 dv=2 parts=1");
  many[Slot::o].strides = {118, 101, 101, 1, 0, 0};
  expect_error([&] { many.run(); }, kInvalid, "o");
}

// dq of 4 heads and dk of 2 inside rows of 10 heads.
TEST(Validate, InterleavedViewsOfUnequalLength) {
  for (const bool dk_first : {false, true}) {
    for (std::int64_t between = 0; between < 10; ++between) {
      Call call("attention pass=backward b=2 sq=8 hq=4 hkv=2 d=16");
      float* data = call.bind(Slot::dq, DType::fp32, {2, 8, 10, 16}).as<float>();
      float* other = data + between * 16;
      call[Slot::dq] = Tensor::strided(dk_first ? other : data, DType::fp32, {2, 8, 4, 16}, {1280, 160, 16, 1});
      call[Slot::dk] = Tensor::strided(dk_first ? data : other, DType::fp32, {2, 8, 2, 16}, {1280, 160, 16, 1});
      // The second begins behind the first and ends before the first one's next row.
      const bool apart = dk_first ? between >= 2 && between <= 6 : between >= 4 && between <= 8;
      if (apart) {
        EXPECT_NO_THROW(call.run()) << dk_first << between;
      } else {
        expect_error([&] { call.run(); }, kInvalid, "dk");
      }
    }
  }
}

}  // namespace
}  // namespace tessera
