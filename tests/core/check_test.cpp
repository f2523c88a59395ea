// SPDX-License-Identifier: Apache-2.0
// Problem::check: every rule, one problem that breaks it and nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "expect_error.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 47;

struct Broken {
  const char* line;
  void (*change)(Problem&);
  ErrorCode code;
  const char* argument;
};

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
const char* const kForward = "attention b=2 sq=8 hq=4 hkv=2";
const char* const kBackward = "attention pass=backward b=2 sq=8 hq=4 hkv=2";
const char* const kPaged = "attention b=2 sq=8 kv=table page=4";
const char* const kSkip = "attention b=2 sq=8 hq=4 hkv=2 list=bitmask skip=mass";
const char* const kCombine = "combine b=2 sq=8 hq=4";
const char* const kAppend = "kv_append b=2 sq=8 hkv=4";

const char* const kSelect = "nsa_select b=2 sq=300 hq=4 hkv=2 causal";
const char* const kGate = "nsa_gate b=2 sq=300 hq=4";
const char* const kPool = "nsa_pool b=2 sk=300 hkv=2";
const char* const kLinear = "linear_decode b=2 t=2 h=4 slots=3";
const char* const kFp8 = "attention b=2 sq=8 hq=4 hkv=2 dtype=e4m3:e4m3:e4m3:bf16";
const char* const kInt8 = "attention b=2 sq=8 hq=4 hkv=2 dtype=int8:int8:bf16:bf16";
const char* const kQuantize = "quantize b=2 sq=8 hq=4 dtype=bf16";

const Broken kBroken[] = {
    {kFp8, [](Problem& p) { p.q_type = DType::e5m2; }, kInvalid, "k_type"},
    {kFp8, [](Problem& p) { p.q_type = DType::int8; }, kInvalid, "k_type"},
    {kFp8, [](Problem& p) { p.k_type = DType::bf16; }, kInvalid, "k_type"},
    {kFp8, [](Problem& p) { p.k_type = DType::e5m2; }, kInvalid, "k_type"},
    {kFp8, [](Problem& p) { p.v_type = DType::bf16; }, kInvalid, "k_type"},
    {kFp8, [](Problem& p) { p.v_type = DType::int8; }, kInvalid, "k_type"},
    {kFp8, [](Problem& p) { p.o_type = DType::e4m3; }, kInvalid, "o_type"},
    {kFp8, [](Problem& p) { p.pass = Pass::backward; }, kInvalid, "pass"},
    {kFp8, [](Problem& p) { p.quantization = {.grain = Grain::block, .block = 0}; }, kInvalid, "quantization.block"},
    {kFp8, [](Problem& p) { p.quantization.block = 8; }, kInvalid, "quantization.block"},
    {kFp8, [](Problem& p) { p.quantization.hadamard = true; }, kInvalid, "quantization.hadamard"},
    {"attention sq=8 kv=table page=12 dtype=e4m3:e4m3:e4m3:bf16",
     [](Problem& p) { p.quantization = {.grain = Grain::block, .block = 8}; }, kInvalid, "quantization.block"},
    {"attention sq=8 kv2=dense sk2=8 dtype=e4m3:e4m3:e4m3:bf16",
     [](Problem& p) { p.quantization.grain = Grain::token; }, kInvalid, "quantization.grain"},
    {kInt8, [](Problem& p) { p.v_type = DType::int8; }, kInvalid, "k_type"},
    {kInt8, [](Problem& p) { p.q_type = DType::bf16; }, kInvalid, "k_type"},
    {kInt8, [](Problem& p) { p.k_type = DType::e4m3; }, kInvalid, "k_type"},
    {kForward, [](Problem& p) { p.k_type = DType::e4m3; }, kInvalid, "k_type"},
    {kForward, [](Problem& p) { p.v_type = DType::e4m3; }, kInvalid, "k_type"},
    {kForward, [](Problem& p) { p.quantization.smooth = true; }, kInvalid, "quantization"},
    {kQuantize, [](Problem& p) { p.pass = Pass::backward; }, kInvalid, "pass"},
    {kQuantize, [](Problem& p) { p.o_type = DType::bf16; }, kInvalid, "o_type"},
    {kQuantize, [](Problem& p) { p.q_type = p.k_type = p.v_type = DType::e4m3; }, kInvalid, "q_type"},
    {kQuantize, [](Problem& p) { p.k_type = DType::fp16; }, kInvalid, "k_type"},
    {kQuantize, [](Problem& p) { p.head_dim_v = 32; }, kInvalid, "head_dim_v"},
    {kQuantize, [](Problem& p) { p.heads_kv = 3; }, kInvalid, "heads_kv"},
    {kQuantize, [](Problem& p) { p.heads_kv = 2, p.quantization.smooth = true; }, kInvalid, "quantization.smooth"},
    {kQuantize, [](Problem& p) { p.kv.seqlen = 8; }, kInvalid, "kv"},
    {kForward, [](Problem& p) { p.batch = -1; }, kInvalid, "batch"},
    {kForward, [](Problem& p) { p.seqlen_q = -1; }, kInvalid, "seqlen_q"},
    {kForward, [](Problem& p) { p.seqlen_q = std::numeric_limits<std::int64_t>::max(); }, ErrorCode::overflow,
     "seqlen_q"},
    {kForward, [](Problem& p) { p.heads_q = 0; }, kInvalid, "heads_q"},
    {kForward, [](Problem& p) { p.heads_kv = 0; }, kInvalid, "heads_kv"},
    {kForward, [](Problem& p) { p.heads_kv = 3; }, kInvalid, "heads_kv"},
    {kForward, [](Problem& p) { p.heads_kv = 8; }, kInvalid, "heads_kv"},
    {kForward, [](Problem& p) { p.head_dim_qk = 0; }, kInvalid, "head_dim_qk"},
    {kForward, [](Problem& p) { p.head_dim_qk = 12; }, kInvalid, "head_dim_qk"},
    {kForward, [](Problem& p) { p.head_dim_qk = 520; }, kInvalid, "head_dim_qk"},
    {kForward, [](Problem& p) { p.head_dim_v = 4; }, kInvalid, "head_dim_v"},
    {kForward, [](Problem& p) { p.q_type = DType::int32; }, kInvalid, "q_type"},
    {kForward, [](Problem& p) { p.k_type = DType::fp64; }, kInvalid, "k_type"},
    {kForward, [](Problem& p) { p.v_type = DType::uint8; }, kInvalid, "v_type"},
    {kForward, [](Problem& p) { p.o_type = DType::int8; }, kInvalid, "o_type"},
    {kForward, [](Problem& p) { p.total_q = 5; }, kInvalid, "total_q"},
    {kForward, [](Problem& p) { p.total_q = -5; }, kInvalid, "total_q"},
    {kForward, [](Problem& p) { p.block_q = 0; }, kInvalid, "block_q"},
    {kForward, [](Problem& p) { p.block_kv = -64; }, kInvalid, "block_kv"},
    {kForward, [](Problem& p) { p.kv.seqlen = -1; }, kInvalid, "kv.seqlen"},
    {kForward, [](Problem& p) { p.kv.total = 3; }, kInvalid, "kv.total"},
    {kForward, [](Problem& p) { p.kv.total = -3; }, kInvalid, "kv.total"},
    {kForward, [](Problem& p) { p.kv.page_size = 3; }, kInvalid, "kv.page_size"},
    {kForward, [](Problem& p) { p.kv2 = KvSource{KvLayout::dense, -4, 0, 0, 0, false}; }, kInvalid, "kv2.seqlen"},
    {kPaged, [](Problem& p) { p.kv.page_size = 0; }, kInvalid, "kv.page_size"},
    {kPaged, [](Problem& p) { p.kv.pages = -1; }, kInvalid, "kv.pages"},
    {kPaged, [](Problem& p) { p.kv.pages = std::int64_t{1} << 31; }, kInvalid, "kv.pages"},
    {kPaged, [](Problem& p) { p.kv.seqused = false; }, kInvalid, "kv.seqused"},
    {"attention sq=8 kv=csr page=4", [](Problem& p) { p.kv.seqused = true; }, kInvalid, "kv.seqused"},
    {kForward, [](Problem& p) { p.scale = std::nanf(""); }, kInvalid, "scale"},
    {kForward, [](Problem& p) { p.softcap = -1.0F; }, kInvalid, "softcap"},
    {kForward, [](Problem& p) { p.softcap = std::numeric_limits<float>::infinity(); }, kInvalid, "softcap"},
    {kForward, [](Problem& p) { p.dropout = 1.0F; }, kInvalid, "dropout"},
    {kForward, [](Problem& p) { p.dropout = -0.1F; }, kInvalid, "dropout"},
    {kForward, [](Problem& p) { p.dropout = std::nanf(""); }, kInvalid, "dropout"},
    {kForward, [](Problem& p) { p.score = "two words"; }, kInvalid, "score"},
    {kForward, [](Problem& p) { p.mask = "a=b"; }, kInvalid, "mask"},
    {kForward, [](Problem& p) { p.mask = std::string(65, 'a'); }, kInvalid, "mask"},
    {kForward, [](Problem& p) { p.window.left = std::numeric_limits<std::int64_t>::max(); }, kInvalid, "window"},
    {kForward, [](Problem& p) { p.window.right = std::numeric_limits<std::int64_t>::min(); }, kInvalid, "window"},
    {kForward,
     [](Problem& p) {
       p.compressed_causal = CompressedCausal{0, 1};
     },
     kInvalid, "compressed_causal.length"},
    {kForward,
     [](Problem& p) {
       p.compressed_causal = CompressedCausal{1, 0};
     },
     kInvalid, "compressed_causal.stride"},
    {"attention sq=65536",
     [](Problem& p) {
       p.compressed_causal = CompressedCausal{1, kHuge};
     },
     ErrorCode::overflow, "compressed_causal.stride"},
    {kForward, [](Problem& p) { p.chunk = -1; }, kInvalid, "chunk"},
    {kForward, [](Problem& p) { p.chunk = std::int64_t{1} << 61; }, kInvalid, "chunk"},
    {kForward, [](Problem& p) { p.list.full = true; }, kInvalid, "list"},
    {kForward, [](Problem& p) { p.bwd_list.form = TileList::Form::bitmask; }, kInvalid, "bwd_list"},
    {kForward, [](Problem& p) { p.next = TileList::Form::transposed; }, kInvalid, "next"},
    {kForward, [](Problem& p) { p.next_threshold = 0.5F; }, kInvalid, "next_threshold"},
    {"attention sq=8 next=indices", [](Problem& p) { p.next_threshold = -0.5F; }, kInvalid, "next_threshold"},
    {kForward, [](Problem& p) { p.mass_prior_lse = true; }, kInvalid, "mass_prior_lse"},
    {kSkip, [](Problem& p) { p.list = {}; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.list.form = TileList::Form::indices; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.list.heads = TileList::Heads::kv; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.list.per_batch = false; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.list.full = true; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.pass = Pass::backward; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.mass = MassKind::rms; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.next = TileList::Form::bitmask; }, kInvalid, "skip"},
    {kSkip, [](Problem& p) { p.skip.growth = -1; }, kInvalid, "skip.growth"},
    {kSkip, [](Problem& p) { p.skip.growth = 256; }, kInvalid, "skip.growth"},
    {kSkip, [](Problem& p) { p.skip.kind = SkipRule::Kind::none; p.skip.own_lse = true; }, kInvalid, "skip"},
    {"attention sq=8 list=bitmask skip=threshold", [](Problem& p) { p.skip.own_lse = true; }, kInvalid, "skip"},
    {"attention sq=8 list=bitmask skip=threshold", [](Problem& p) { p.skip.growth = 2; }, kInvalid, "skip"},
    {"combine sq=8", [](Problem& p) { p.skip.kind = SkipRule::Kind::mass; }, kInvalid, "skip"},
    {"attention sq=4294967296 block=1x64 list=bitmask:1:1", [](Problem&) {}, ErrorCode::overflow, "block_kv"},
    {"attention pass=backward sq=4294967296 sk=64 block=1x64 bwd_list=bitmask:1:1", [](Problem&) {},
     ErrorCode::overflow, "block_kv"},
    {"attention sq=4294967296 sk=64 block=1x64 next=bitmask", [](Problem&) {}, ErrorCode::overflow, "block_kv"},
    {"attention sq=64 sk=4294967296 block=64x1 next=bitmask", [](Problem&) {}, ErrorCode::overflow, "block_kv"},
    {kForward, [](Problem& p) { p.dlse = true; }, kInvalid, "dlse"},
    {kForward, [](Problem& p) { p.residual = true; }, kInvalid, "residual"},
    {kBackward, [](Problem& p) { p.residual = true; }, kInvalid, "residual"},
    {"combine sq=8 dtype=bf16", [](Problem& p) { p.residual = true; }, kInvalid, "residual"},
    {kForward, [](Problem& p) { p.grad_fp32 = true; }, kInvalid, "grad_fp32"},
    {kForward, [](Problem& p) { p.accumulate = true; }, kInvalid, "accumulate"},
    {kBackward, [](Problem& p) { p.accumulate = true; }, kInvalid, "accumulate"},
    {kForward, [](Problem& p) { p.combine.parts = 3; }, kInvalid, "combine.parts"},
    {kForward, [](Problem& p) { p.append.rotary = Rotary::half; }, kInvalid, "append.rotary"},
    {kForward,
     [](Problem& p) {
       p.batch = kHuge;
       p.seqlen_q = 65536;
     },
     ErrorCode::overflow, "seqlen_q"},
    {"attention sq=8 layout=varlen",
     [](Problem& p) {
       p.total_q = kHuge;
       p.heads_q = 1024;
     },
     ErrorCode::overflow, "total_q"},
    {kForward,
     [](Problem& p) {
       p.batch = 65536;
       p.kv.seqlen = kHuge;
     },
     ErrorCode::overflow, "kv"},
    {"attention sq=8 kv=varlen",
     [](Problem& p) {
       p.batch = 65536;
       p.kv.seqlen = kHuge;
     },
     ErrorCode::overflow, "kv.seqlen"},
    {"attention sq=8 kv=table page=4",
     [](Problem& p) {
       p.kv.page_size = kHuge;
       p.kv.pages = 1 << 30;
     },
     ErrorCode::overflow, "kv"},
    {"attention b=1048576 sq=1048576 hq=64 hkv=1 d=8 block=1x1 mass=mean", [](Problem&) {}, ErrorCode::overflow,
     "block_q"},
    {kCombine, [](Problem& p) { p.combine.parts = 0; }, kInvalid, "combine.parts"},
    {kCombine,
     [](Problem& p) {
       p.combine.parts = kHuge;
       p.batch = 1024;
     },
     ErrorCode::overflow, "combine.parts"},
    {kCombine, [](Problem& p) { p.kv.layout = KvLayout::varlen; }, kInvalid, "kv"},
    {kCombine, [](Problem& p) { p.kv.seqlen = -1; }, kInvalid, "kv.seqlen"},
    {kCombine, [](Problem& p) { p.seqused_q = true; }, kInvalid, "seqused_q"},
    {kCombine, [](Problem& p) { p.append.rotary_dim = 8; }, kInvalid, "append.rotary_dim"},
    {kCombine, [](Problem& p) { p.window.right = 0; }, kInvalid, "window"},
    {kCombine, [](Problem& p) { p.pass = Pass::backward; }, kInvalid, "pass"},
    {kCombine, [](Problem& p) { p.kv2.emplace(); }, kInvalid, "kv2"},
    {kCombine, [](Problem& p) { p.dropout = 0.5F; }, kInvalid, "dropout"},
    {kCombine, [](Problem& p) { p.head_dim_v = 513; }, kInvalid, "head_dim_v"},
    {kAppend, [](Problem& p) { p.head_dim_qk = 1024; }, kInvalid, "head_dim_qk"},
    {kAppend, [](Problem& p) { p.kv.layout = KvLayout::varlen; }, kInvalid, "kv.layout"},
    {kAppend, [](Problem& p) { p.kv.seqused = false; }, kInvalid, "kv.seqused"},
    {kAppend, [](Problem& p) { p.sink = true; }, kInvalid, "sink"},
    {kAppend, [](Problem& p) { p.lse = true; }, kInvalid, "lse"},
    {kAppend, [](Problem& p) { p.combine.parts = 1; }, kInvalid, "combine.parts"},
    {kAppend, [](Problem& p) { p.softcap = 1.0F; }, kInvalid, "softcap"},
    {kAppend, [](Problem& p) { p.append.rotary_dim = 8; }, kInvalid, "append.rotary_dim"},
    {kAppend, [](Problem& p) { p.append.rotary = Rotary::half; }, kInvalid, "append.rotary_dim"},
    {kAppend,
     [](Problem& p) {
       p.append.rotary = Rotary::half;
       p.append.rotary_dim = 7;
     },
     kInvalid, "append.rotary_dim"},
    {kAppend,
     [](Problem& p) {
       p.append.rotary = Rotary::half;
       p.append.rotary_dim = 66;
     },
     kInvalid, "append.rotary_dim"},
    {kForward, [](Problem& p) { p.linear.states = 2; }, kInvalid, "linear.states"},
    {kAppend, [](Problem& p) { p.linear.state_type = DType::bf16; }, kInvalid, "linear.state_type"},
    {kCombine, [](Problem& p) { p.linear.state_layout = StateLayout::kv; }, kInvalid, "linear.state_layout"},
    {kLinear, [](Problem& p) { p.seqlen_q = 0; }, kInvalid, "seqlen_q"},
    {kLinear, [](Problem& p) { p.seqlen_q = 9; }, kInvalid, "seqlen_q"},
    {"linear_decode ring=16", [](Problem& p) { p.seqlen_q = 9; }, kInvalid, "seqlen_q"},
    {"linear_decode t=0 ring=16", [](Problem& p) { p.linear.ring = 0; }, kInvalid, "seqlen_q"},
    {kLinear, [](Problem& p) { p.linear.ring = 1; }, kInvalid, "linear.ring"},
    {kLinear, [](Problem& p) { p.linear.ring = 65; }, kInvalid, "linear.ring"},
    {kLinear, [](Problem& p) { p.linear.ring = -4; }, kInvalid, "linear.ring"},
    {kLinear,
     [](Problem& p) {
       p.linear.ring = 64;
       p.linear.states = kHuge / 4;
     },
     ErrorCode::overflow, "linear.ring"},
    {"linear_chunk t=9 slots=2", [](Problem& p) { p.linear.ring = 16; }, kInvalid, "linear.ring"},
    {kLinear, [](Problem& p) { p.linear.rounding = Rounding::stochastic; }, kInvalid, "linear.rounding"},
    {"linear_chunk t=9 slots=2 state=bf16", [](Problem& p) { p.linear.rounding = Rounding::stochastic; }, kInvalid,
     "linear.rounding"},
    {kAppend, [](Problem& p) { p.linear.rounding = Rounding::stochastic; }, kInvalid, "linear.rounding"},
    {kForward, [](Problem& p) { p.linear.ring = 8; }, kInvalid, "linear.ring"},
    {kLinear, [](Problem& p) { p.heads_kv = 2; }, kInvalid, "heads_kv"},
    {kLinear, [](Problem& p) { p.head_dim_qk = 12; }, kInvalid, "head_dim_qk"},
    {kLinear, [](Problem& p) { p.head_dim_v = 20; }, kInvalid, "head_dim_v"},
    {kLinear, [](Problem& p) { p.linear.states = -1; }, kInvalid, "linear.states"},
    {kLinear, [](Problem& p) { p.linear.states = kHuge; }, ErrorCode::overflow, "linear.states"},
    {kLinear, [](Problem& p) { p.linear.state_type = DType::fp16; }, kInvalid, "linear.state_type"},
    {kLinear, [](Problem& p) { p.scale = std::numeric_limits<float>::infinity(); }, kInvalid, "scale"},
    {kLinear, [](Problem& p) { p.q_layout = Layout::varlen; }, kInvalid, "q_layout"},
    {kLinear, [](Problem& p) { p.seqused_q = true; }, kInvalid, "seqused_q"},
    {kLinear, [](Problem& p) { p.kv.seqlen = 1; }, kInvalid, "kv"},
    {kLinear, [](Problem& p) { p.softcap = 1.0F; }, kInvalid, "softcap"},
    {kLinear, [](Problem& p) { p.pass = Pass::backward; }, kInvalid, "pass"},
    {kLinear, [](Problem& p) { p.sink = true; }, kInvalid, "sink"},
    {kLinear, [](Problem& p) { p.lse = true; }, kInvalid, "lse"},
    {kLinear, [](Problem& p) { p.combine.parts = 3; }, kInvalid, "combine.parts"},
    {kLinear, [](Problem& p) { p.append.rotary = Rotary::half; }, kInvalid, "append.rotary"},
    {kPool, [](Problem& p) { p.nsa.length = 0; }, kInvalid, "nsa.length"},
    {kPool, [](Problem& p) { p.nsa.stride = 0; }, kInvalid, "nsa.stride"},
    {kPool, [](Problem& p) { p.nsa.stride = 65; }, kInvalid, "nsa.stride"},
    {kPool, [](Problem& p) { p.nsa.length = 4 * kHuge; }, ErrorCode::overflow, "nsa.length"},
    {kPool, [](Problem& p) { p.kv.layout = KvLayout::paged_csr, p.kv.page_size = 8; }, kInvalid, "kv.layout"},
    {kPool, [](Problem& p) { p.kv.seqused = true; }, kInvalid, "kv.seqused"},
    {kPool, [](Problem& p) { p.kv.seqlen = -1; }, kInvalid, "kv.seqlen"},
    {kPool, [](Problem& p) { p.seqlen_q = 1; }, kInvalid, "seqlen_q"},
    {kPool, [](Problem& p) { p.heads_q = 4; }, kInvalid, "heads_q"},
    {kPool, [](Problem& p) { p.scale = 1.0F; }, kInvalid, "scale"},
    {kPool, [](Problem& p) { p.sink = true; }, kInvalid, "sink"},
    {kPool, [](Problem& p) { p.kv2.emplace(); }, kInvalid, "kv2"},
    {kForward, [](Problem& p) { p.nsa.stride = 8; }, kInvalid, "nsa.stride"},
    {kPool, [](Problem& p) { p.nsa.top = 8; }, kInvalid, "nsa.top"},
    {kPool, [](Problem& p) { p.nsa.gate = GateKind::mean; }, kInvalid, "nsa.gate"},
    {kSelect, [](Problem& p) { p.nsa.project = true; }, kInvalid, "nsa.project"},
    {kSelect, [](Problem& p) { p.nsa.length = 0; }, kInvalid, "nsa.length"},
    {kSelect, [](Problem& p) { p.nsa.block = 0; }, kInvalid, "nsa.block"},
    {kSelect, [](Problem& p) { p.nsa.block = 32; }, kInvalid, "nsa.score"},
    {kSelect, [](Problem& p) { p.nsa.score = SelectScore::softmax, p.nsa.stride = 48; }, kInvalid, "nsa.stride"},
    {kSelect, [](Problem& p) { p.nsa.score = SelectScore::softmax, p.nsa.block = 96; }, kInvalid, "nsa.stride"},
    {kSelect, [](Problem& p) { p.nsa.top = 0; }, kInvalid, "nsa.top"},
    {kSelect, [](Problem& p) { p.nsa.top = 2; }, kInvalid, "nsa.top"},
    {kSelect, [](Problem& p) { p.nsa.top = 5, p.nsa.tile = 256; }, kInvalid, "nsa.top"},
    {kSelect, [](Problem& p) { p.nsa.top = 3, p.nsa.tile = 48; }, kInvalid, "nsa.top"},
    {kSelect, [](Problem& p) { p.nsa.tile = 0; }, kInvalid, "nsa.tile"},
    {kSelect, [](Problem& p) { p.nsa.compressed_top = -1; }, kInvalid, "nsa.compressed_top"},
    {kSelect, [](Problem& p) { p.nsa.compressed_top = 1, p.nsa.tile = 2; }, kInvalid, "nsa.compressed_top"},
    {kSelect,
     [](Problem& p) { p.nsa.compressed_top = 5, p.nsa.compressed_block = 1, p.nsa.top = 9, p.nsa.tile = 258; },
     kInvalid, "nsa.compressed_top"},
    {kSelect, [](Problem& p) { p.nsa.compressed_top = 4 * kHuge; }, ErrorCode::overflow, "nsa.compressed_top"},
    {kSelect, [](Problem& p) { p.nsa.compressed_top = 4, p.nsa.compressed_block = 0; }, kInvalid,
     "nsa.compressed_block"},
    {kSelect, [](Problem& p) { p.nsa.compressed_block = 32; }, kInvalid, "nsa.compressed_block"},
    {kSelect, [](Problem& p) { p.nsa.initial = -1; }, kInvalid, "nsa.initial"},
    {kSelect, [](Problem& p) { p.nsa.local = -1; }, kInvalid, "nsa.local"},
    {kSelect, [](Problem& p) { p.nsa.top = 4 * kHuge; }, ErrorCode::overflow, "nsa.top"},
    {kSelect, [](Problem& p) { p.heads_kv = 3; }, kInvalid, "heads_kv"},
    {kSelect, [](Problem& p) { p.pass = Pass::backward; }, kInvalid, "pass"},
    {kSelect, [](Problem& p) { p.seqused_q = true; }, kInvalid, "seqused_q"},
    {kSelect, [](Problem& p) { p.scale = std::numeric_limits<float>::infinity(); }, kInvalid, "scale"},
    {kGate, [](Problem& p) { p.nsa.length = 8; }, kInvalid, "nsa.length"},
    {kGate, [](Problem& p) { p.kv.layout = KvLayout::varlen; }, kInvalid, "kv"},
    {kGate, [](Problem& p) { p.seqused_q = true; }, kInvalid, "seqused_q"},
    {kGate, [](Problem& p) { p.lse = true; }, kInvalid, "lse"},
};

class CheckRefuses : public testing::TestWithParam<Broken> {};

TEST_P(CheckRefuses, TheField) {
  const Broken& broken = GetParam();
  SCOPED_TRACE(broken.line);
  expect_error(
      [&] {
        Problem p = Problem::parse(broken.line);
        broken.change(p);
        p.check();
      },
      broken.code, broken.argument);
}

INSTANTIATE_TEST_SUITE_P(Problem, CheckRefuses, testing::ValuesIn(kBroken));

TEST(Check, ZeroSizesAreFine) {
  for (const char* line : {"attention sq=0",
                           "attention b=0 sq=8",
                           "attention sq=8 sk=0",
                           "attention sq=0 layout=varlen",
                           "attention sq=3 sk=0 kv=table page=4",
                           "combine sq=0",
                           "kv_append sq=0",
                           "linear_decode b=0",
                           "linear_decode b=0 slots=4",
                           "linear_decode t=0 ring=1",
                           "linear_decode b=0 ring=64",
                           "linear_chunk b=0 t=8",
                           "linear_chunk t=0 slots=2",
                           "linear_chunk b=2 t=8 varlen tq=0",
                           "nsa_pool sk=0",
                           "nsa_pool b=0 sk=8 project",
                           "nsa_pool b=2 sk=80 kv=varlen tk=0",
                           "nsa_select sq=0",
                           "nsa_select sq=9 sk=0 causal",
                           "nsa_gate sq=0",
                           "quantize sq=0",
                           "quantize b=0 sq=8 descale=token smooth hadamard",
                           "nsa_gate pass=backward b=0 sq=8"}) {
    EXPECT_NO_THROW(Problem::parse(line)) << line;
  }
}

}  // namespace
}  // namespace tessera
