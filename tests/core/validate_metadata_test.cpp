// SPDX-License-Identifier: Apache-2.0
// Lengths, page tables, offsets and tile lists that are wrong inside.
#include <cmath>
#include <limits>

#include "bad_call.h"

namespace tessera {
namespace {

constexpr ErrorCode kRange = ErrorCode::out_of_range;
const char* const kVarlen = "attention b=3 sq=8 sk=6 d=16 layout=varlen";
const char* const kUsed = "attention b=3 sq=8 sk=6 d=16 layout=varlen seqused_q seqused_k";
const char* const kDenseUsed = "attention b=3 sq=8 sk=6 d=16 seqused_q seqused_k";
const char* const kTable = "attention b=2 sq=2 sk=10 d=16 kv=table page=4";
const char* const kCsr = "attention b=2 sq=2 sk=10 d=16 kv=csr page=4";
const char* const kTwo = "attention b=2 sq=2 sk=4 d=16 kv2=csr sk2=10 page2=4";
const char* const kIndices = "attention b=2 sq=40 hq=2 d=16 block=16x16 list=indices:q:b:full";
const char* const kTransposed = "attention b=2 sq=40 sk=20 hq=2 d=16 block=16x16 list=transposed:1:1:full";
const char* const kBits = "attention b=2 sq=40 hq=2 d=16 block=16x16 list=bitmask:kv:b:full";
const char* const kBackward = "attention pass=backward b=2 sq=40 d=16 block=16x16 bwd_list=indices:q:b:full";
const char* const kAppend = "kv_append b=2 sq=2 sk=10 d=16 rotary=half:8";
const char* const kAppendTable = "kv_append b=2 sq=2 sk=10 d=16 kv=table page=4";
const char* const kAppendCsr = "kv_append b=2 sq=2 sk=10 d=16 kv=csr page=4";

template <Slot slot, std::int64_t index, std::int32_t value>
void set(Call& call) {
  call.int32(slot, index) = value;
}

void bind_offset(Call& call, Slot slot, std::int64_t value) {
  Tensor& tensor = call.bind(slot, DType::int64, {call.problem.batch});
  tensor.as<std::int64_t>()[call.problem.batch - 1] = value;
}

const char* const kLinear = "linear_decode b=3 h=2 d=16 slots=4";
const char* const kRing = "linear_decode b=3 h=2 d=16 slots=4 ring=4";
const char* const kChunk = "linear_chunk b=3 t=9 h=2 d=16 slots=4";
const char* const kChunkVarlen = "linear_chunk b=3 t=9 h=2 d=16 varlen";

const char* const kSkip = "attention b=2 sq=40 sk=700 hq=2 d=16 block=16x16 list=bitmask skip=mass";
const char* const kSkipThreshold = "attention b=2 sq=40 sk=700 hq=2 d=16 block=16x16 list=bitmask skip=threshold";

template <Slot slot, std::int64_t word, std::uint32_t value>
void set_bits(Call& call) {
  call[slot].as<std::uint32_t>()[word] = value;
}
void set_threshold(Call& call, float value) { call[Slot::skip_threshold].as<float>()[1] = value; }

const BadCall kBadCalls[] = {
    {"skip_bits_beyond", kSkip, set_bits<Slot::tile_bits, 1, 1U << 12>, kRange, "tile_bits"},
    {"skip_must_do_beyond", kSkip, set_bits<Slot::must_do_bits, 1, 1U << 12>, kRange, "must_do_bits"},
    {"skip_must_skip_beyond", kSkipThreshold, set_bits<Slot::must_skip_bits, 1, 1U << 31>, kRange, "must_skip_bits"},
    {"skip_must_both", kSkip,
     [](Call& c) {
       set_bits<Slot::must_do_bits, 1, 6>(c);
       set_bits<Slot::must_skip_bits, 1, 12>(c);
     },
     kRange, "must_skip_bits"},
    {"skip_everything", kSkip,
     [](Call& c) {
       set_bits<Slot::must_skip_bits, 0, ~0U>(c);
       set_bits<Slot::must_skip_bits, 1, 0xFFF>(c);
     },
     kRange, "must_skip_bits"},
    {"skip_threshold_nan", kSkip, [](Call& c) { set_threshold(c, std::nanf("")); }, kRange, "skip_threshold"},
    {"skip_threshold_of_no_tile", kSkip, [](Call& c) { set_threshold(c, 2.0F); }, kRange, "skip_threshold"},
    {"skip_threshold_infinite", kSkip, [](Call& c) { set_threshold(c, std::numeric_limits<float>::infinity()); },
     kRange, "skip_threshold"},
    {"skip_octaves_above_0", kSkipThreshold, [](Call& c) { set_threshold(c, 0.5F); }, kRange, "skip_threshold"},
    {"skip_octaves_too_low", kSkipThreshold, [](Call& c) { set_threshold(c, -101.0F); }, kRange, "skip_threshold"},
    {"skip_octaves_nan", kSkipThreshold, [](Call& c) { set_threshold(c, std::nanf("")); }, kRange, "skip_threshold"},
    {"skip_step_negative", kSkipThreshold, set<Slot::skip_step, 0, -1>, kRange, "skip_step"},
    {"skip_state_of_another_shape", kSkip,
     [](Call& c) {
       c.bind(Slot::skip_memory, DType::uint8, {2, 2, 3, 43});
     },
     ErrorCode::invalid_argument, "skip_memory"},
    {"skip_state_of_another_type", kSkip,
     [](Call& c) {
       c.bind(Slot::skip_memory, DType::int8, {2, 2, 3, 44});
     },
     ErrorCode::invalid_argument, "skip_memory"},
    {"skip_memory_unbound", kSkip, [](Call& c) { c[Slot::skip_memory] = {}; }, ErrorCode::invalid_argument,
     "skip_memory"},
    {"skip_step_unbound", kSkipThreshold, [](Call& c) { c[Slot::skip_step] = {}; }, ErrorCode::invalid_argument,
     "skip_step"},
    {"skip_memory_for_threshold", kSkipThreshold,
     [](Call& c) {
       c.bind(Slot::skip_memory, DType::uint8, {2, 2, 3, 44});
     },
     ErrorCode::invalid_argument, "skip_memory"},
    {"state_slot_beyond", kLinear, set<Slot::state_slots, 1, 4>, kRange, "state_slots"},
    {"state_slot_long", kLinear,
     [](Call& c) { c.bind(Slot::state_slots, DType::int64, {3}).as<std::int64_t>()[2] = std::int64_t{1} << 32; },
     kRange, "state_slots"},
    {"dest_slot_beyond", kLinear,
     [](Call& c) {
       c.bind(Slot::dest_slots, {3}, {0, 1, 9});
     },
     kRange, "dest_slots"},
    {"cursor_negative", kRing, set<Slot::ring_cursor, 2, -1>, kRange, "ring_cursor"},
    {"cursor_beyond", kRing, set<Slot::ring_cursor, 0, 10>, kRange, "ring_cursor"},
    {"slope_negative", kLinear, [](Call& c) { c[Slot::decay_slopes].as<float>()[1] = -0.5F; }, kRange, "decay_slopes"},
    {"slope_nan", kLinear, [](Call& c) { c[Slot::decay_slopes].as<float>()[0] = std::nanf(""); }, kRange,
     "decay_slopes"},
    {"chunk_slot_beyond", kChunk, set<Slot::state_slots, 2, 4>, kRange, "state_slots"},
    {"chunk_slope_negative", kChunkVarlen, [](Call& c) { c[Slot::decay_slopes].as<float>()[1] = -1.0F; }, kRange,
     "decay_slopes"},
    {"chunk_cu_decreasing", kChunkVarlen, set<Slot::cu_seqlens_q, 2, 5>, kRange, "cu_seqlens_q"},
    {"chunk_cu_longer_than_longest", kChunkVarlen, set<Slot::cu_seqlens_q, 1, 10>, kRange, "cu_seqlens_q"},
    {"chunk_cu_past_capacity", kChunkVarlen, set<Slot::cu_seqlens_q, 3, 28>, kRange, "cu_seqlens_q"},
    {"cu_from_one", kVarlen, set<Slot::cu_seqlens_q, 0, 1>, kRange, "cu_seqlens_q"},
    {"cu_negative", kVarlen, set<Slot::cu_seqlens_q, 1, -8>, kRange, "cu_seqlens_q"},
    {"cu_decreasing", kVarlen, set<Slot::cu_seqlens_k, 2, 5>, kRange, "cu_seqlens_k"},
    {"cu_past_capacity", kVarlen, set<Slot::cu_seqlens_q, 3, 25>, kRange, "cu_seqlens_q"},
    {"cu_longer_than_longest", kVarlen, set<Slot::cu_seqlens_k, 1, 7>, kRange, "cu_seqlens_k"},
    {"used_negative", kUsed, set<Slot::seqused_q, 0, -1>, kRange, "seqused_q"},
    {"used_beyond_sequence", kUsed, set<Slot::seqused_k, 2, 7>, kRange, "seqused_k"},
    {"used_beyond_rows", kDenseUsed, set<Slot::seqused_q, 1, 9>, kRange, "seqused_q"},
    {"used_k_negative", kDenseUsed, set<Slot::seqused_k, 1, -9>, kRange, "seqused_k"},
    {"table_length", kTable, set<Slot::seqused_k, 1, 11>, kRange, "seqused_k"},
    {"table_page_negative", kTable, set<Slot::page_table, 2, -1>, kRange, "page_table"},
    {"table_page_beyond", kTable, set<Slot::page_table, 5, 6>, kRange, "page_table"},
    {"indptr_first", kCsr, set<Slot::page_indptr, 0, 1>, kRange, "page_indptr"},
    {"indptr_decreasing", kCsr, set<Slot::page_indptr, 1, 7>, kRange, "page_indptr"},
    {"indptr_beyond_indices", kCsr, set<Slot::page_indptr, 2, 7>, kRange, "page_indptr"},
    {"csr_page", kCsr, set<Slot::page_indices, 3, 6>, kRange, "page_indices"},
    {"csr_page_negative", kCsr, set<Slot::page_indices, 0, -3>, kRange, "page_indices"},
    {"last_page_empty", kCsr, set<Slot::last_page_len, 0, 0>, kRange, "last_page_len"},
    {"last_page_over_with_room", kCsr,
     [](Call& c) {
       c.int32(Slot::page_indptr, 2) -= 1;
       c.int32(Slot::last_page_len, 1) = 5;
     },
     kRange, "last_page_len"},
    {"last_page_over", kCsr, set<Slot::last_page_len, 1, 5>, kRange, "last_page_len"},
    {"last_page_too_long", kCsr, set<Slot::last_page_len, 1, 3>, kRange, "last_page_len"},
    {"last_page_of_no_pages", kCsr, set<Slot::page_indptr, 1, 0>, kRange, "last_page_len"},
    {"second_source_page", kTwo, set<Slot::page_indices2, 1, 77>, kRange, "page_indices2"},
    {"second_source_last", kTwo, set<Slot::last_page_len2, 1, 0>, kRange, "last_page_len2"},
    {"q_offset", kVarlen, [](Call& c) { bind_offset(c, Slot::q_offset, std::numeric_limits<std::int64_t>::max()); },
     kRange, "q_offset"},
    {"k_offset", kVarlen, [](Call& c) { bind_offset(c, Slot::k_offset, std::numeric_limits<std::int64_t>::min()); },
     kRange, "k_offset"},
    {"k_offset_compressed_causal", "attention b=2 sq=4 compressed_causal=4:1024",
     [](Call& c) { bind_offset(c, Slot::k_offset, std::int64_t{1} << 51); }, kRange, "k_offset"},
    {"k_offset2", kTwo, [](Call& c) { bind_offset(c, Slot::k_offset2, -(std::int64_t{1} << 61)); }, kRange,
     "k_offset2"},
    {"count_negative", kIndices, set<Slot::tile_counts, 0, -1>, kRange, "tile_counts"},
    {"count_over_capacity", kIndices, set<Slot::tile_counts, 11, 3>, kRange, "tile_counts"},
    {"index_negative", kIndices, set<Slot::tile_indices, 0, -1>, kRange, "tile_indices"},
    {"index_beyond", kIndices, set<Slot::tile_indices, 22, 3>, kRange, "tile_indices"},
    {"index_repeated", kIndices, set<Slot::tile_counts, 4, 2>, kRange, "tile_indices"},
    {"index_unsorted", kIndices,
     [](Call& c) {
       c.int32(Slot::full_counts, 0) = 2;
       c.int32(Slot::full_indices, 0) = 2;
       c.int32(Slot::full_indices, 1) = 1;
     },
     kRange, "full_indices"},
    {"partial_and_full", kIndices, set<Slot::full_indices, 4, 0>, kRange, "full_indices"},
    {"full_count", kIndices, set<Slot::full_counts, 3, 9>, kRange, "full_counts"},
    {"transposed_query_block", kTransposed, set<Slot::tile_indices, 0, 3>, kRange, "tile_indices"},
    {"transposed_both", kTransposed, set<Slot::full_indices, 2, 0>, kRange, "full_indices"},
    {"bits_beyond", kBits, [](Call& c) { c[Slot::tile_bits].as<std::uint32_t>()[5] = 8; }, kRange, "tile_bits"},
    {"full_bits_beyond", kBits, [](Call& c) { c[Slot::full_bits].as<std::uint32_t>()[0] = 0x80000000U; }, kRange,
     "full_bits"},
    {"bits_both", kBits, [](Call& c) { c[Slot::full_bits].as<std::uint32_t>()[3] = 1; }, kRange, "full_bits"},
    {"backward_index", kBackward, set<Slot::bwd_tile_indices, 0, 9>, kRange, "bwd_tile_indices"},
    {"backward_count", kBackward, set<Slot::bwd_full_counts, 0, 9>, kRange, "bwd_full_counts"},
    {"append_no_room", kAppend, set<Slot::seqused_k, 1, 9>, kRange, "seqused_k"},
    {"append_negative", kAppend, set<Slot::seqused_k, 0, -1>, kRange, "seqused_k"},
    {"append_positions", kAppend,
     [](Call& c) {
       c.bind(Slot::rotary_cos, DType::fp32, {9, 4});
     },
     kRange, "rotary_cos"},
    {"append_sine_positions", kAppend,
     [](Call& c) {
       c.bind(Slot::rotary_sin, DType::fp32, {0, 4});
     },
     kRange, "rotary_sin"},
    {"append_page", kAppendTable, set<Slot::page_table, 2, 99>, kRange, "page_table"},
    {"append_table_no_room", kAppendTable, set<Slot::seqused_k, 0, 10>, kRange, "seqused_k"},
    {"append_pages", kAppendCsr,
     [](Call& c) {
       c.int32(Slot::page_indptr, 1) = 2;
       c.int32(Slot::page_indptr, 2) = 4;
     },
     kRange, "page_indptr"},
    {"append_csr_page", kAppendCsr, set<Slot::page_indices, 5, -2>, kRange, "page_indices"},
};

class MetadataRefused : public testing::TestWithParam<BadCall> {};
TEST_P(MetadataRefused, BeforeAnythingIsWritten) { expect_refused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Validate, MetadataRefused, testing::ValuesIn(kBadCalls), bad_call_name);

TEST(Validate, EmptySequencesAndUnusedEntriesAreRight) {
  const auto good = [](const char* line, void (*change)(Call&)) {
    Call call(line);
    change(call);
    EXPECT_NO_THROW(call.run()) << line;
  };
  good(kVarlen, [](Call& c) {
    c.bind(Slot::cu_seqlens_q, {4}, {0, 0, 8, 8});
    c.bind(Slot::cu_seqlens_k, {4}, {0, 6, 6, 6});
  });
  good(kLinear, [](Call& c) {
    c.bind(Slot::state_slots, {3}, {-1, -2, -1});
    c.bind(Slot::dest_slots, {3}, {3, -1, 3});
    c[Slot::decay_slopes].as<float>()[0] = std::numeric_limits<float>::infinity();
  });
  good(kLinear, [](Call& c) { c[Slot::state_slots] = {}; });
  good(kRing, [](Call& c) {
    c.bind(Slot::state_slots, {3}, {-1, 2, 0});
    c.bind(Slot::ring_cursor, {3}, {-7, 9, 0});  // the first sequence has no ring
  });
  good(kTable, [](Call& c) {
    c.int32(Slot::seqused_k, 0) = 4;
    c.int32(Slot::page_table, 1) = -1;
    c.int32(Slot::page_table, 2) = 1 << 30;
  });
  good(kCsr, [](Call& c) {
    c.bind(Slot::page_indptr, {3}, {0, 0, 3});
    c.bind(Slot::last_page_len, {2}, {0, 2});
  });
  // Entries behind a count are not looked at.
  good(kIndices, [](Call& c) {
    c.int32(Slot::tile_counts, 0) = 0;
    c.int32(Slot::tile_indices, 0) = -7;
    c.int32(Slot::tile_indices, 3) = 99;
  });
  good(kSkip, [](Call& c) {
    set_bits<Slot::must_skip_bits, 0, ~0U>(c);  // one key block is left
    set_bits<Slot::must_skip_bits, 1, 0x7FF>(c);
    set_threshold(c, -std::numeric_limits<float>::infinity());
  });
  good(kSkipThreshold, [](Call& c) { c[Slot::must_do_bits] = c[Slot::must_skip_bits] = {}; });
  // Under a list of its own the backward takes the forward's list or leaves it.
  const char* both = "attention pass=backward sq=40 d=16 block=16x16 list=bitmask bwd_list=indices";
  good(both, [](Call&) {});
  good(both, [](Call& c) { c[Slot::tile_bits] = {}; });
  const char* both_indices = "attention pass=backward sq=40 d=16 block=16x16 list=indices bwd_list=bitmask";
  good(both_indices, [](Call& c) { c[Slot::tile_counts] = {}; });
}

TEST(Validate, ZeroSizesRun) {
  for (const char* line : {"attention sq=0 sk=8",
                           "attention b=0 sq=8 lse",
                           "attention b=2 sq=8 sk=0 lse",
                           "attention sq=0 sk=0 layout=varlen",
                           "attention b=0 sq=4 layout=varlen",
                           "attention pass=backward sq=0 sk=8",
                           "attention pass=backward sq=8 sk=0",
                           "attention b=2 sq=4 sk=0 kv=table page=4",
                           "attention b=2 sq=4 sk=0 list=bitmask",
                           "attention b=2 sq=4 sk=0 list=transposed mass=mean next=indices",
                           "attention b=2 sq=4 sk=0 list=bitmask skip=mass",
                           "attention b=0 sq=4 sk=8 list=bitmask skip=threshold",
                           "combine sq=0 lse",
                           "combine b=0 sq=4",
                           "kv_append sq=0 sk=8",
                           "kv_append b=0 sq=2 sk=8 kv=csr page=4",
                           "linear_decode b=0",
                           "linear_decode b=0 slots=3",
                           "linear_decode b=0 ring=3",
                           "linear_decode b=2 t=0 ring=3",
                           "linear_chunk b=0 t=9 slots=3",
                           "linear_chunk b=2 t=0 slots=3",
                           "linear_chunk pass=backward b=2 t=0 slots=3",
                           "linear_chunk b=2 t=9 varlen tq=18"}) {
    Call call(line);
    EXPECT_NO_THROW(call.run()) << line;
  }
}

}  // namespace
}  // namespace tessera
