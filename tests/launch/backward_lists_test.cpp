// SPDX-License-Identifier: Apache-2.0
// Lists and masks in the backward on a GPU: the bits that a list leaves to a pass, and which tiles and passes it wants.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <tuple>

#include "cuda/attention/backward/config.h"
#include "cuda/attention/backward/lists/list_bits.h"
#include "launch/backward.h"
#include "plan/implementations.h"

namespace tessera {
namespace {

using cuda::BwdConfig;
using cuda::BwdParams;
using cuda::Gradients;
using cuda::Products;

// A row of bits for each tile that blocks own, of the list's heads and sequences, behind all else in the workspace; a
// kernel in front of the passes marks them, a warp for each row of the list.
TEST_F(Backward, BitsOfAList) {
  const struct {
    const char* words;
    Gradients of;  // the last pass over scores
    std::int64_t rows, heads, batches;
  } forms[] = {{"d=128 block=128x128 list=bitmask:q", Gradients::all, 3, 4, 2},
               {"d=128 block=128x128 list=bitmask:kv:1 deterministic", Gradients::keys, 3, 2, 1},
               {"d=64 block=64x64 bwd_list=bitmask:1", Gradients::keys, 5, 1, 2},
               {"d=96 block=16x48 list=transposed:q", Gradients::keys, 5, 4, 2}};
  for (const auto& [words, of, rows, heads, batches] : forms) {
    const Problem problem =
        Problem::parse(std::string("attention pass=backward b=2 sq=300 sk=200 hq=4 hkv=2 dtype=bf16 ") + words);
    const Plan plan = make_plan(problem, Target::cuda_device(0));
    EXPECT_EQ(plan.state().kernels[1].name, "bwd_mark_tiles");
    Bindings bindings = dense(problem);
    if (problem.bwd_list || problem.list.form == TileList::Form::bitmask) {
      bindings[problem.bwd_list ? Slot::bwd_tile_bits : Slot::tile_bits] =
          tensor(DType::uint32, {batches, heads, rows, 1});
    } else {
      bindings[Slot::tile_counts] = tensor(DType::int32, {batches, heads, rows});
      bindings[Slot::tile_indices] = tensor(DType::int32, {batches, heads, rows, 7});
    }
    gpu_.launches = 0;
    Executor(plan).run(bindings);
    EXPECT_EQ(gpu_.launches, 4) << words;
    const BwdParams p = params();
    const bool all = of == Gradients::all;
    EXPECT_EQ(p.list_rows, rows);
    EXPECT_EQ(p.tile_bits[0].words == nullptr, all);
    std::int64_t count = 0;
    for (const Gradients pass : {Gradients::queries, of}) {
      const BwdConfig config = cuda::bwd_config(problem, plan.target(), Products::wgmma, pass);
      EXPECT_EQ(config.truncates, bool{problem.bwd_list});
      EXPECT_EQ(config.list_elements, problem.block_q == 16);
      if (pass == Gradients::queries && all) continue;
      const cuda::TileBits& bits = p.tile_bits[pass == Gradients::queries ? 0 : 1];
      EXPECT_EQ(bits.words, p.cleared_words + count);
      EXPECT_EQ(bits.tile_q, config.tile_q);
      EXPECT_EQ(bits.tile_kv, config.tile_kv);
      EXPECT_EQ(bits.keys_own, pass != Gradients::queries);
      EXPECT_EQ(bits.row_words, 1);
      const std::int64_t own =
          pass == Gradients::queries ? cuda::divide_up(300, config.tile_q) : cuda::divide_up(200, config.tile_kv);
      EXPECT_EQ(bits.head_stride, heads == 1 ? 0 : own);
      EXPECT_EQ(bits.batch_stride, batches == 1 ? 0 : heads * own);
      count += batches * heads * own;
    }
    EXPECT_EQ(p.cleared_count, count);
    EXPECT_EQ(static_cast<const void*>(p.cleared_words + count),
              static_cast<const void*>(reinterpret_cast<const char*>(p.values.lse) -
                                       (all ? 4 * 2 * 5 * 64 * problem.head_dim_qk * 4 : 0) + plan.workspace_bytes()));
  }
}

// In one pass by mma.sync tiles of keys that many rows meet have parts, which a kernel behind the marks finds: as many
// as all tiles of rows allow, and no more than their sums have room for.
TEST_F(Backward, PartsOfTilesOfKeys) {
  const Problem problem = Problem::parse(
      "attention pass=backward b=2 sq=300 sk=200 hq=4 hkv=2 d=128 dtype=bf16 block=32x64 list=bitmask:q");
  const Plan plan = make_plan(problem, Target::cuda_device(0));
  EXPECT_EQ(plan.implementation(), "cuda.bwd_mma");
  EXPECT_EQ(plan.state().kernels[2].name, "bwd_split_keys");
  Bindings bindings = dense(problem);
  bindings[Slot::tile_bits] = tensor(DType::uint32, {2, 4, 10, 1});
  gpu_.launches = 0;
  Executor(plan).run(bindings);
  EXPECT_EQ(gpu_.launches, 5);
  const BwdParams p = params();
  const cuda::KeyParts& parts = p.key_parts;
  EXPECT_EQ(parts.tiles, 4 * 2 * 2);
  EXPECT_EQ(parts.walks, 2);
  EXPECT_EQ(parts.most, 2 * (4 * 10 * 4 * 2) / cuda::kLeastPart);
  EXPECT_TRUE(p.tile_bits[1].counts);
  EXPECT_EQ(p.tile_bits[1].row_words, 2);  // the second counts
  const auto at = [](const void* pointer) { return static_cast<const char*>(pointer); };
  EXPECT_GE(at(parts.parts), at(p.cleared_words + p.cleared_count));
  EXPECT_GE(at(parts.count), at(parts.parts + parts.most));
  EXPECT_GE(at(parts.done), at(parts.count + 1));
  EXPECT_GE(at(parts.is_split), at(parts.done + parts.most));
  EXPECT_GE(at(parts.sums), at(parts.is_split + parts.tiles));
  EXPECT_EQ(at(parts.sums + parts.most * std::int64_t{64} * 256), at(p.query_sums.data) + plan.workspace_bytes());
}

// By wgmma blocks share the rows of tiles of keys that are fewer than multiprocessors, or where that is wished for:
// every part has the tiles' blocks, and each tile a count, which the kernel in front sets to zero.
TEST_F(Backward, PartsOfRows) {
  const Problem problem = Problem::parse("attention pass=backward b=2 sq=1000 sk=300 hq=4 hkv=2 d=128 dtype=bf16");
  const Plan plan = make_plan(problem, Target::cuda_device(0), Wishes::parse("splits=5"));
  EXPECT_EQ(plan.implementation(), "cuda.bwd_wgmma");
  EXPECT_EQ(plan.state().splits, 4);  // 16 tiles of rows, 4 a part
  EXPECT_NE(plan.state().kernels[1].name.find("splits_rows"), std::string::npos);
  const Bindings bindings = dense(problem);
  Executor(plan).run(bindings);
  const BwdParams p = params();
  const cuda::RowParts& parts = p.row_parts;
  EXPECT_EQ(parts.key_blocks.value, 3U * 2 * 2);
  EXPECT_EQ(parts.tiles, 4);
  EXPECT_EQ(parts.parts, 4);
  EXPECT_EQ(static_cast<const void*>(parts.done), p.cleared_words);
  EXPECT_EQ(p.cleared_count, 12);
  const auto at = [](const void* pointer) { return static_cast<const char*>(pointer); };
  EXPECT_GE(at(parts.sums), at(parts.done + 12));
  EXPECT_EQ(at(parts.sums + std::int64_t{12} * 4 * 128 * 256), at(p.query_sums.data) + plan.workspace_bytes());

  // With a fixed order of the sums of dQ each of their tiles has a count, too.
  const Problem fixed =
      Problem::parse("attention pass=backward b=2 sq=1000 sk=300 hq=4 hkv=2 d=128 dtype=bf16 deterministic");
  const Plan fixed_plan = make_plan(fixed, Target::cuda_device(0), Wishes::parse("splits=5"));
  Executor(fixed_plan).run(dense(fixed));
  const BwdParams f = params();
  constexpr std::size_t counts = 4 * 2 * 16;  // heads, sequences, tiles of 64 rows
  EXPECT_EQ(fixed_plan.workspace_bytes(), plan.workspace_bytes() + counts * 4);
  EXPECT_EQ(at(f.values.lse), at(f.query_sums.added + counts));
  EXPECT_GE(at(f.row_parts.done), at(f.values.delta));
  EXPECT_EQ(f.row_parts.parts, 4);

  const auto splits = [](const char* line, int multiprocessors) {
    Target target = Target::emulate(90, 0);
    target.multiprocessors = multiprocessors;
    return make_plan(Problem::parse(std::string("attention pass=backward dtype=bf16 d=128 ") + line), target)
        .state()
        .splits;
  };
  constexpr const char* few_keys = "sq=8192 sk=128 hq=32 hkv=8 compressed_causal=64:64";
  EXPECT_EQ(splits(few_keys, 132), 16);
  EXPECT_EQ(splits(few_keys, 0), 1);
  EXPECT_EQ(splits("sq=8192 sk=128 hq=32 hkv=8 compressed_causal=64:64 deterministic", 132), 16);
  EXPECT_EQ(splits("sq=8192 sk=128 hq=32 hkv=8 compressed_causal=64:64 batch_invariant", 132), 1);
  EXPECT_EQ(splits("sq=256 sk=128 hq=8 hkv=2", 132), 1);    // parts would be short
  EXPECT_EQ(splits("sq=8192 hq=32 hkv=8 causal", 132), 1);  // 512 blocks
}

// Blocks of 64 rows or keys have warpgroups of their own, where no sum of dQ wants two.
TEST_F(Backward, TilesThatFitTheListsBlocks) {
  const auto config = [](const char* words, Gradients of) {
    const Problem problem = Problem::parse(std::string("attention pass=backward sq=4096 hq=2 dtype=bf16 ") + words);
    return cuda::bwd_config(problem, Target::emulate(90, 0), Products::wgmma, of);
  };
  for (const Gradients of : {Gradients::queries, Gradients::keys}) {
    EXPECT_EQ(config("d=128 list=indices block=128x128", of).warps, 8);
    EXPECT_EQ(config("d=128 list=indices block=64x64", of).warps, 4);
    EXPECT_FALSE(config("d=128 list=indices block=64x64", of).list_elements);
    EXPECT_TRUE(config("d=128 list=indices block=48x64", of).list_elements);
    EXPECT_FALSE(config("d=64 list=indices block=5000x5000", of).list_elements);
  }
}

// Full tiles are told apart where a mask is waived in them, for whole tiles of the kernel; where these cut the list's
// blocks, elements are looked up in the list.
TEST_F(Backward, FullTilesOfAList) {
  const auto problem = [](const std::string& more) {
    return Problem::parse("attention pass=backward sq=4096 hq=2 d=64 dtype=bf16 " + more);
  };
  for (const int sm : {80, 90}) {
    const Target target = Target::emulate(sm, 0);
    const Products products = sm == 90 ? Products::wgmma : Products::mma_sync;
    for (const Gradients of : {Gradients::queries, Gradients::keys}) {
      for (const auto& [words, elements, waives] :
           {std::tuple{"list=indices:q:b:full mask=document block=128x128", false, true},
            {"list=indices:q:b:full mask=document block=64x64", false, true},
            {"list=indices:q:b:full mask=document block=64x48", true, false},
            {"list=indices:q:b:full block=128x128", false, false},
            {"list=indices:q:b mask=document block=128x128", false, false},
            {"list=indices:q:b:full bwd_list=indices mask=document block=128x128", false, false},
            {"list=indices bwd_list=indices:q:b:full mask=document block=128x128", false, true}}) {
        const BwdConfig config = cuda::bwd_config(problem(words), target, products, of);
        EXPECT_EQ(config.list_elements, elements) << words;
        EXPECT_EQ(config.list_waives, waives) << words;
        EXPECT_EQ(config.as_forward().list_waives, waives) << words;
      }
    }
    const BwdConfig plain =
        cuda::bwd_config(problem("list=indices:q:b mask=document block=128x128"), target, products, Gradients::queries);
    const BwdConfig waiving = cuda::bwd_config(problem("list=indices:q:b:full mask=document block=128x128"), target,
                                               products, Gradients::queries);
    const Problem both = problem("list=indices:q:b:full mask=document block=128x128");
    EXPECT_EQ(cuda::bit_count(both, waiving), 2 * cuda::bit_count(both, plain));
    EXPECT_EQ(cuda::tile_bits(both, plain, nullptr).waived_words, 0);
    const cuda::TileBits bits = cuda::tile_bits(both, waiving, nullptr);
    EXPECT_EQ(bits.waived_words, cuda::divide_up(4096 / waiving.tile_kv, 32));
    EXPECT_EQ(bits.row_words, 2 * bits.waived_words);
    EXPECT_EQ(bits.head_stride, 4096 / waiving.tile_q * bits.row_words);
  }
}

// What a mask hides is two registers, which a pass that finds all gradients has; by mma.sync its tiles are smaller
// then.
TEST_F(Backward, AMaskLeavesAllGradientsToOnePass) {
  const auto all = [](const std::string& more, Products products = Products::wgmma) {
    const Problem problem = Problem::parse("attention pass=backward sq=4096 hq=2 dtype=bf16 mask=document " + more);
    return cuda::finds_all(problem, Target::emulate(products == Products::wgmma ? 90 : 80, 0), products);
  };
  for (const char* dim : {"d=64", "d=96", "d=128"}) {
    EXPECT_TRUE(all(dim)) << dim;
    EXPECT_TRUE(all(std::string(dim) + " list=indices:q:b:full block=128x128")) << dim;
    EXPECT_TRUE(all(dim, Products::mma_sync)) << dim;
    EXPECT_TRUE(all(std::string(dim) + " list=indices:q:b:full block=128x128", Products::mma_sync)) << dim;
  }
  EXPECT_FALSE(all("d=64 list=indices:q:b:full block=48x48"));
  for (const Products products : {Products::wgmma, Products::mma_sync}) {
    EXPECT_TRUE(all("d=64 alibi", products));
    EXPECT_FALSE(all("d=128 softcap=9", products));
  }
  EXPECT_FALSE(all("d=192"));
  EXPECT_TRUE(all("d=192", Products::mma_sync));
}

// Tiles of wgmma have 64 rows: where blocks of a list have 32, one pass by mma.sync has tiles that they do not cut,
// unless its sums would need an order or somebody wishes otherwise.
TEST_F(Backward, ListsOfShortBlocksGoToOnePassByMmaSync) {
  const auto plan = [](const std::string& more, const char* wish = "") {
    Wishes wishes;
    wishes.implementation = wish;
    return make_plan(Problem::parse("attention pass=backward sq=4096 hq=8 hkv=2 dtype=bf16 list=indices " + more),
                     Target::emulate(90, 0), wishes);
  };
  for (const char* words :
       {"d=128 block=32x64 causal", "d=64 block=32x128 sink", "d=96 block=32x64 compressed_causal=8:4"}) {
    EXPECT_EQ(plan(words).implementation(), "cuda.bwd_mma") << words;
    EXPECT_EQ(plan(words).state().tile_q, 32) << words;
  }
  for (const char* words : {"d=128 block=64x64", "d=128 block=32x64 deterministic", "d=128 block=32x64 softcap=30",
                            "d=256 block=32x64", "d=128 block=16x64"}) {
    EXPECT_EQ(plan(words).implementation(), "cuda.bwd_wgmma") << words;
  }
  EXPECT_EQ(plan("d=128 block=32x64", "cuda.bwd_wgmma").implementation(), "cuda.bwd_wgmma");
}

// Where blocks have fewer queries still, tiles are filled with rows of several of the query heads that share a key head
// and its list: of the fewest that do. Two blocks of four warps are better than one of eight, where both fit.
TEST_F(Backward, RowsOfHeadsThatShareAListArePacked) {
  const struct {
    const char* words;
    int heads, tile_q, tile_kv;
  } packed[] = {{"hq=32 hkv=2 d=128 list=indices:kv block=8x64", 4, 32, 64},
                {"hq=16 hkv=2 d=64 list=bitmask:kv block=16x64 sink", 2, 32, 64},
                {"hq=16 hkv=2 d=128 list=indices:1 block=24x64", 4, 32, 64},
                {"hq=16 hkv=2 d=128 list=indices:kv block=40x128", 8, 64, 128},
                {"hq=64 hkv=2 d=64 list=transposed:kv block=4x128", 16, 64, 128},
                {"hq=12 hkv=1 d=128 list=indices:kv block=8x64", 4, 32, 64},
                {"hq=16 hkv=2 d=96 list=indices:kv block=8x64", 4, 32, 64},
                {"hq=64 hkv=1 d=128 bwd_list=indices:kv block=1x64", 32, 32, 64},
                {"hq=8 hkv=1 d=256 list=indices:kv block=8x64", 8, 64, 64}};
  const auto problem = [](const std::string& words) {
    return Problem::parse("attention pass=backward sq=4096 dtype=bf16 " + words);
  };
  for (const int sm : {80, 90}) {
    const Target target = Target::emulate(sm, 0);
    for (const auto& [words, heads, tile_q, tile_kv] : packed) {
      EXPECT_EQ(make_plan(problem(words), target).implementation(), "cuda.bwd_mma") << words;
      const BwdConfig config = cuda::bwd_config(problem(words), target, Products::mma_sync, Gradients::all);
      EXPECT_EQ(config.heads_a_tile, heads) << words;
      EXPECT_EQ(config.tile_q, tile_q) << words;
      EXPECT_EQ(config.tile_kv, tile_kv) << words;
      EXPECT_FALSE(config.list_elements) << words;
    }
    if (sm == 80) {
      const BwdConfig small =
          cuda::bwd_config(problem(packed[0].words), Target::emulate(89, 0), Products::mma_sync, Gradients::all);
      EXPECT_EQ(std::tuple(small.heads_a_tile, small.tile_q, small.warps), std::tuple(8, 64, 8));
    }
    // Tiles of a single head's rows that fit the blocks stay; and heads that do not share a list, or are too few for a
    // tile, have elements looked up, as have sums in a fixed order.
    for (const char* words :
         {"hq=16 hkv=2 d=128 list=indices:kv block=32x64", "hq=16 hkv=2 d=128 list=indices:kv block=64x64"}) {
      const BwdConfig config = cuda::bwd_config(problem(words), target, Products::mma_sync, Gradients::all);
      EXPECT_EQ(config.heads_a_tile, 1) << words;
    }
    for (const char* words :
         {"hq=16 hkv=2 d=128 list=indices:q block=8x64", "hq=6 hkv=2 d=128 list=indices:kv block=8x64",
          "hq=16 hkv=2 d=128 list=indices:kv block=8x64 deterministic", "hq=16 hkv=2 d=128 list=indices:kv block=8x48",
          "hq=16 hkv=2 d=128 list=indices:kv block=8x64 softcap=30"}) {
      EXPECT_FALSE(cuda::finds_all(problem(words), target, Products::mma_sync)) << words;
    }
  }
}

// The memory of a packed backward: tiles of 64 rows of sums for every group of heads, and bits for tiles of as many
// queries as one has.
TEST_F(Backward, SumsAndBitsOfPackedRows) {
  const Problem problem = Problem::parse(
      "attention pass=backward b=2 sq=100 sk=200 hq=32 hkv=2 d=64 dtype=bf16 block=8x64 list=bitmask:kv");
  const Plan plan = make_plan(problem, Target::cuda_device(0));
  EXPECT_NE(plan.explain().find("bwd_row_values type=bf16 dv=64 cleared_rows=64 clears heads_a_tile=4"),
            std::string::npos);
  Bindings bindings = dense(problem);
  bindings[Slot::tile_bits] = tensor(DType::uint32, {2, 2, 13, 1});
  Executor(plan).run(bindings);
  const BwdParams p = params();
  EXPECT_EQ(p.query_sums.head_tiles, 2 * 7);  // 16 queries each
  // The last kernel stores dQ.
  EXPECT_EQ(gpu_.last.grid, (std::array<std::uint32_t, 3>{7, 32 / 4, 2}));
  EXPECT_EQ(p.values.lse - p.query_sums.data, 32 / 4 * 2 * 7 * 64 * 64);
  const cuda::TileBits& bits = p.tile_bits[1];
  EXPECT_EQ(bits.tile_q, 8);
  EXPECT_EQ(bits.row_words, 2);  // of 13 tiles, and their count
  EXPECT_EQ(p.key_parts.most, 2 * (4 * 13 * 8 * 2) / cuda::kLeastPart);
  EXPECT_EQ(p.key_parts.walks, 16 / 4);
}

}  // namespace
}  // namespace tessera
