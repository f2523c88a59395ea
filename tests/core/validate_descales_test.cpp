// SPDX-License-Identifier: Apache-2.0
// Descales that are wrong: missing, of another shape or type, or no positive numbers where rows are read.
#include <limits>

#include "bad_call.h"

namespace tessera {
namespace {

constexpr ErrorCode kWrong = ErrorCode::invalid_argument;
constexpr ErrorCode kNoScale = ErrorCode::out_of_range;
const char* const kHead = "attention b=2 sq=8 hq=4 hkv=2 d=16 dtype=e4m3:e4m3:e4m3:bf16";
const char* const kToken = "attention b=2 sq=8 hq=4 hkv=2 d=16 dtype=e4m3:e4m3:e4m3:bf16 descale=token";
const char* const kInt8 = "attention b=2 sq=8 hq=4 hkv=2 d=16 dtype=int8:int8:bf16:bf16 smooth";
const char* const kCache = "attention b=2 sq=2 sk=8 d=16 kv=table page=4 dtype=bf16:e4m3:e4m3:bf16 descale=token";
const char* const kGiven = "quantize b=2 sq=8 hq=2 d=16 given";

void put(Call& call, Slot slot, std::int64_t index, float value) { call[slot].as<float>()[index] = value; }

const BadCall kBadDescales[] = {
    {"q_unbound", kHead, [](Call& c) { c[Slot::q_descale] = {}; }, kWrong, "q_descale"},
    {"k_unbound", kHead, [](Call& c) { c[Slot::k_descale] = {}; }, kWrong, "k_descale"},
    {"v_unbound", kHead, [](Call& c) { c[Slot::v_descale] = {}; }, kWrong, "v_descale"},
    {"mean_unbound", kInt8, [](Call& c) { c[Slot::k_mean] = {}; }, kWrong, "k_mean"},
    {"of_a_wide_v", kInt8,
     [](Call& c) {
       c.bind(Slot::v_descale, DType::fp32, {2, 2});
     },
     kWrong, "v_descale"},
    {"of_a_wide_q", kCache,
     [](Call& c) {
       c.bind(Slot::q_descale, DType::fp32, {2, 1, 2});
     },
     kWrong, "q_descale"},
    {"mean_not_asked_for", kHead,
     [](Call& c) {
       c.bind(Slot::k_mean, DType::fp32, {2, 2, 16});
     },
     kWrong, "k_mean"},
    {"q_by_query_head", kHead,
     [](Call& c) {
       c.bind(Slot::q_descale, DType::fp32, {2, 4});
     },
     kWrong, "q_descale"},
    {"k_by_token", kHead,
     [](Call& c) {
       c.bind(Slot::k_descale, DType::fp32, {2, 2, 8});
     },
     kWrong, "k_descale"},
    {"tokens_first", kToken,
     [](Call& c) {
       c.bind(Slot::k_descale, DType::fp32, {2, 8, 2});
     },
     kWrong, "k_descale"},
    {"half", kHead,
     [](Call& c) {
       c.bind(Slot::k_descale, DType::bf16, {2, 2});
     },
     kWrong, "k_descale"},
    {"zero", kHead, [](Call& c) { put(c, Slot::q_descale, 3, 0); }, kNoScale, "q_descale"},
    {"negative", kHead, [](Call& c) { put(c, Slot::k_descale, 1, -1); }, kNoScale, "k_descale"},
    {"nan", kHead, [](Call& c) { put(c, Slot::v_descale, 0, std::numeric_limits<float>::quiet_NaN()); }, kNoScale,
     "v_descale"},
    {"infinite", kHead, [](Call& c) { put(c, Slot::k_descale, 2, std::numeric_limits<float>::infinity()); }, kNoScale,
     "k_descale"},
    {"of_a_token", kToken, [](Call& c) { put(c, Slot::k_descale, 31, 0); }, kNoScale, "k_descale"},
    {"of_a_query", kToken, [](Call& c) { put(c, Slot::q_descale, 63, 0); }, kNoScale, "q_descale"},
    {"of_a_page", kCache, [](Call& c) { put(c, Slot::v_descale, 15, 0); }, kNoScale, "v_descale"},
    {"given_zero", kGiven, [](Call& c) { put(c, Slot::x_descale, 3, 0); }, kNoScale, "x_descale"},
    {"x_unbound", kGiven, [](Call& c) { c[Slot::x] = {}; }, kWrong, "x"},
    {"quantized_type", kGiven, [](Call& c) { c[Slot::x_quantized].dtype = DType::int8; }, kWrong, "x_quantized"},
    {"in_place", kGiven, [](Call& c) { c[Slot::x_quantized].data = c[Slot::x].data; }, kWrong, "x_quantized"},
};

class ValidateDescales : public testing::TestWithParam<BadCall> {};
TEST_P(ValidateDescales, AreRefused) { expect_refused(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Bad, ValidateDescales, testing::ValuesIn(kBadDescales), bad_call_name);

TEST(ValidateDescalesOfRowsInUse, OthersMayBeAnything) {
  Call tokens("attention b=2 sq=8 hq=4 hkv=2 d=16 dtype=e4m3:e4m3:e4m3:bf16 descale=token seqused_q seqused_k");
  tokens.int32(Slot::seqused_q, 0) = 7;
  tokens.int32(Slot::seqused_k, 1) = 3;
  put(tokens, Slot::q_descale, 7, 0);
  put(tokens, Slot::k_descale, 16 + 3, -1);
  EXPECT_NO_THROW(tokens.run());
  put(tokens, Slot::k_descale, 16 + 2, -1);
  expect_error([&] { tokens.run(); }, kNoScale, "k_descale");

  Call blocks("attention b=2 sq=8 d=16 dtype=int8:int8:bf16:bf16 descale=block:4 seqused_k");
  blocks.int32(Slot::seqused_k, 0) = 4;
  put(blocks, Slot::k_descale, 1, 0);
  EXPECT_NO_THROW(blocks.run());

  Call pages(kCache);
  pages.int32(Slot::seqused_k, 0) = 6;
  put(pages, Slot::k_descale, 6, 0);
  EXPECT_NO_THROW(pages.run());
  put(pages, Slot::k_descale, 5, 0);
  expect_error([&] { pages.run(); }, kNoScale, "k_descale");
}

}  // namespace
}  // namespace tessera
