// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/dlpack.h"
#include "tessera/callable.h"
#include "tessera/executor.h"
#include "tessera/tessera.h"
#include "tessera/version.h"

extern "C" int tessera_test_c_program(void);

namespace {

TEST(CProgram, Runs) { EXPECT_EQ(tessera_test_c_program(), 0) << tessera_last_error(); }

TEST(CSkipState, RunsStepsAndIsSaved) {
  tessera_problem* problem = nullptr;
  tessera_plan* plan = nullptr;
  tessera_bindings* bindings = nullptr;
  tessera_executor* executor = nullptr;
  tessera_skip_state* state = nullptr;
  ASSERT_EQ(tessera_problem_parse("attention sq=32 sk=64 d=8 block=16x16 list=bitmask skip=mass", &problem),
            TESSERA_OK);
  ASSERT_EQ(tessera_plan_make(problem, nullptr, "", &plan), TESSERA_OK);
  ASSERT_EQ(tessera_bindings_create(&bindings), TESSERA_OK);
  ASSERT_EQ(tessera_executor_create(plan, &executor), TESSERA_OK);
  tessera_skip_options options{};
  options.struct_size = sizeof options;
  options.steps = 3;
  options.first = options.last = 0.5F;
  EXPECT_EQ(tessera_skip_state_create(problem, nullptr, &state), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error_argument(), "options");
  const tessera_skip_head beyond{1, 0.5F, 0.5F};
  options.heads = &beyond;
  options.head_count = 1;
  EXPECT_EQ(tessera_skip_state_create(problem, &options, &state), TESSERA_OUT_OF_RANGE);
  EXPECT_STREQ(tessera_last_error_argument(), "heads");
  options.head_count = 0;
  options.layer = "first";
  ASSERT_EQ(tessera_skip_state_create(problem, &options, &state), TESSERA_OK) << tessera_last_error();

  // Each query's score with the keys of one tile is far above the others.
  std::vector<float> q(32 * 8), k(64 * 8), v(64 * 8, 1.0F), o(32 * 8);
  for (std::size_t i = 0; i < 32; ++i) q[i * 8 + i / 16] = 40;
  for (std::size_t j = 0; j < 64; ++j) k[j * 8 + j / 16] = 1;
  const std::int64_t q_shape[] = {1, 32, 1, 8}, k_shape[] = {1, 64, 1, 8};
  const auto bind = [&](const char* slot, std::vector<float>& data, const std::int64_t* shape) {
    tessera_tensor tensor;
    ASSERT_EQ(tessera_tensor_contiguous(&tensor, data.data(), TESSERA_FP32, shape, 4), TESSERA_OK);
    ASSERT_EQ(tessera_bindings_set(bindings, slot, &tensor), TESSERA_OK);
  };
  bind("q", q, q_shape);
  bind("k", k, k_shape);
  bind("v", v, k_shape);
  bind("o", o, q_shape);
  double share = 0;
  for (const auto& [step, want] : {std::pair{0, 1.0}, {1, 0.25}, {2, 0.25}}) {
    ASSERT_EQ(tessera_skip_state_bind(state, step, bindings), TESSERA_OK) << tessera_last_error();
    ASSERT_EQ(tessera_executor_run(executor, bindings, nullptr), TESSERA_OK) << tessera_last_error();
    ASSERT_EQ(tessera_skip_state_active(state, &share), TESSERA_OK);
    EXPECT_EQ(share, want) << step;
  }
  EXPECT_EQ(tessera_skip_state_bind(state, 1, bindings), TESSERA_OUT_OF_RANGE);
  EXPECT_STREQ(tessera_last_error_argument(), "step");

  std::size_t bytes = 0, needed = 0;
  ASSERT_EQ(tessera_skip_state_bytes(state, &bytes), TESSERA_OK);
  EXPECT_EQ(bytes, 2U * 4 + 8 + 32 * 4);
  ASSERT_EQ(tessera_skip_state_save(state, nullptr, 0, &needed), TESSERA_OK);
  std::vector<char> file(needed), again(needed);
  ASSERT_EQ(tessera_skip_state_save(state, file.data(), file.size(), nullptr), TESSERA_OK);
  ASSERT_EQ(tessera_skip_state_reset(state), TESSERA_OK);
  ASSERT_EQ(tessera_skip_state_active(state, &share), TESSERA_OK);
  EXPECT_EQ(share, 1.0);
  ASSERT_EQ(tessera_skip_state_load(state, file.data(), file.size()), TESSERA_OK) << tessera_last_error();
  ASSERT_EQ(tessera_skip_state_save(state, again.data(), again.size(), nullptr), TESSERA_OK);
  EXPECT_EQ(file, again);
  EXPECT_EQ(tessera_skip_state_load(state, nullptr, 4), TESSERA_INVALID_ARGUMENT);

  const tessera_token_range all{0, 64}, half{0, 32}, inside{1, 15};
  EXPECT_EQ(tessera_skip_state_set_ranges(state, nullptr, 0, &all, 1), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_skip_state_set_ranges(state, &inside, 1, nullptr, 0), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_skip_state_set_ranges(state, nullptr, 1, nullptr, 0), TESSERA_INVALID_ARGUMENT);
  ASSERT_EQ(tessera_skip_state_set_ranges(state, &half, 1, nullptr, 0), TESSERA_OK);
  ASSERT_EQ(tessera_skip_state_active(state, &share), TESSERA_OK);
  EXPECT_EQ(share, 0.5);
  char line[200];
  ASSERT_EQ(tessera_skip_state_describe(state, line, sizeof line, nullptr), TESSERA_OK);
  EXPECT_EQ(std::string(line).find("skip state of first: "), 0U) << line;
  ASSERT_EQ(tessera_skip_state_reshape(state, problem), TESSERA_OK);
  tessera_skip_state_destroy(state);
  tessera_skip_state_destroy(nullptr);
  tessera_executor_destroy(executor);
  tessera_bindings_destroy(bindings);
  tessera_plan_destroy(plan);
  tessera_problem_destroy(problem);
}

class CApi : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(tessera_problem_parse("attention sq=4 d=8 lse", &problem_), TESSERA_OK);
    ASSERT_EQ(tessera_plan_make(problem_, nullptr, "", &plan_), TESSERA_OK);
    ASSERT_EQ(tessera_bindings_create(&bindings_), TESSERA_OK);
  }
  void TearDown() override {
    tessera_bindings_destroy(bindings_);
    tessera_plan_destroy(plan_);
    tessera_problem_destroy(problem_);
  }
  static void expect_error(int got, int code, const char* argument) {
    EXPECT_EQ(got, code) << tessera_last_error();
    EXPECT_EQ(tessera_last_error_code(), code);
    EXPECT_STREQ(tessera_last_error_argument(), argument);
    EXPECT_NE(std::strstr(tessera_last_error(), "; want "), nullptr) << tessera_last_error();
  }
  void bind_all() {
    const std::int64_t shape[] = {1, 4, 1, 8};
    int at = 0;
    for (const char* slot : {"q", "k", "v", "o"}) {
      tessera_tensor tensor;
      ASSERT_EQ(tessera_tensor_contiguous(&tensor, memory_[at++], TESSERA_FP32, shape, 4), TESSERA_OK);
      ASSERT_EQ(tessera_bindings_set(bindings_, slot, &tensor), TESSERA_OK);
    }
    tessera_tensor lse;
    const std::int64_t lse_shape[] = {1, 1, 4};
    ASSERT_EQ(tessera_tensor_contiguous(&lse, memory_[4], TESSERA_FP32, lse_shape, 3), TESSERA_OK);
    ASSERT_EQ(tessera_bindings_set(bindings_, "lse", &lse), TESSERA_OK);
  }

  tessera_problem* problem_ = nullptr;
  tessera_plan* plan_ = nullptr;
  tessera_bindings* bindings_ = nullptr;
  alignas(64) float memory_[5][32] = {};
};

TEST_F(CApi, TextIsCutToTheBuffer) {
  std::size_t needed = 0;
  char small[10];
  ASSERT_EQ(tessera_problem_to_string(problem_, small, sizeof small, &needed), TESSERA_OK);
  EXPECT_STREQ(small, "attention");
  EXPECT_EQ(needed, std::strlen("attention sq=4 d=8 lse"));
  ASSERT_EQ(tessera_problem_to_string(problem_, nullptr, 0, &needed), TESSERA_OK);
  std::string whole(needed + 1, '?');
  ASSERT_EQ(tessera_problem_to_string(problem_, whole.data(), whole.size(), nullptr), TESSERA_OK);
  EXPECT_STREQ(whole.c_str(), "attention sq=4 d=8 lse");
}

TEST_F(CApi, PlansSayWhatTheyAre) {
  char text[4096];
  ASSERT_EQ(tessera_plan_explain(plan_, text, sizeof text, nullptr), TESSERA_OK);
  EXPECT_NE(std::strstr(text, "cpu.tiled"), nullptr);
  ASSERT_EQ(tessera_plan_implementation(plan_, text, sizeof text, nullptr), TESSERA_OK);
  EXPECT_STREQ(text, "cpu.tiled");
  ASSERT_EQ(tessera_build_info(text, sizeof text, nullptr), TESSERA_OK);
  EXPECT_NE(std::strstr(text, tessera::version()), nullptr);
  ASSERT_EQ(tessera_cpu_isas(text, sizeof text, nullptr), TESSERA_OK);
  EXPECT_GT(std::strlen(text), 0U);
  EXPECT_STREQ(tessera_version(), tessera::version());
}

TEST_F(CApi, TargetsAndWishes) {
  tessera_target target{};
  target.struct_size = sizeof target;
  target.threads = 1;
  target.isa = "";
  int supported = -1;
  char reason[2048];
  ASSERT_EQ(tessera_supports(problem_, &target, "splits=1", &supported, reason, sizeof reason, nullptr), TESSERA_OK);
  EXPECT_EQ(supported, 1) << reason;
  target.device_type = TESSERA_CUDA;
  target.sm = 90;
  target.shared_memory = 1 << 16;
  target.emulated = 1;
  ASSERT_EQ(tessera_supports(problem_, &target, nullptr, &supported, reason, sizeof reason, nullptr), TESSERA_OK);
  EXPECT_EQ(supported, 0);
  EXPECT_NE(std::strstr(reason, "one type, bf16 or fp16"), nullptr);
  tessera_plan* plan = plan_;
  expect_error(tessera_plan_make(problem_, &target, nullptr, &plan), TESSERA_UNSUPPORTED, "problem");
  EXPECT_EQ(plan, nullptr);
  tessera_problem* half = nullptr;
  ASSERT_EQ(tessera_problem_parse("attention sq=64 d=64 dtype=bf16", &half), TESSERA_OK);
  target.device_index = 3;
  if (tessera_plan_make(half, &target, nullptr, &plan) == TESSERA_OK) {
    ASSERT_EQ(tessera_plan_explain(plan, reason, sizeof reason, nullptr), TESSERA_OK);
    EXPECT_NE(std::strstr(reason, " device=3"), nullptr) << reason;
  } else {  // a plan needs no GPU, but where there are some the device is one of them
    EXPECT_STREQ(tessera_last_error_argument(), "device");
  }
  tessera_plan_destroy(plan);
  tessera_problem_destroy(half);
  target.sm = -1;
  expect_error(tessera_plan_make(problem_, &target, nullptr, &plan), TESSERA_INVALID_ARGUMENT, "target.sm");
  target.device_type = 9;
  expect_error(tessera_plan_make(problem_, &target, nullptr, &plan), TESSERA_INVALID_ARGUMENT, "target");
  expect_error(tessera_plan_make(problem_, nullptr, "tile_q=x", &plan), TESSERA_PARSE, "tile_q");
}

TEST_F(CApi, NullsAreErrors) {
  tessera_problem* problem = nullptr;
  expect_error(tessera_problem_parse(nullptr, &problem), TESSERA_INVALID_ARGUMENT, "text");
  expect_error(tessera_problem_parse("attention sq=1", nullptr), TESSERA_INVALID_ARGUMENT, "problem");
  expect_error(tessera_problem_parse("attention sq=-1", &problem), TESSERA_INVALID_ARGUMENT, "seqlen_q");
  expect_error(tessera_problem_parse("attention", &problem), TESSERA_PARSE, "sq");
  expect_error(tessera_problem_to_string(nullptr, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT, "problem");
  tessera_plan* plan = nullptr;
  expect_error(tessera_plan_make(nullptr, nullptr, nullptr, &plan), TESSERA_INVALID_ARGUMENT, "problem");
  expect_error(tessera_plan_explain(nullptr, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT, "plan");
  expect_error(tessera_bindings_set(nullptr, "q", nullptr), TESSERA_INVALID_ARGUMENT, "bindings");
  expect_error(tessera_bindings_set(bindings_, nullptr, nullptr), TESSERA_INVALID_ARGUMENT, "slot");
  expect_error(tessera_bindings_set(bindings_, "queries", nullptr), TESSERA_INVALID_ARGUMENT, "slot");
  expect_error(tessera_bindings_set_dlpack(bindings_, "q", nullptr), TESSERA_INVALID_ARGUMENT, "tensor");
  expect_error(tessera_bindings_set_dropout(nullptr, 1, 2), TESSERA_INVALID_ARGUMENT, "bindings");
  expect_error(tessera_executor_run(nullptr, bindings_, nullptr), TESSERA_INVALID_ARGUMENT, "executor");
  expect_error(tessera_tensor_contiguous(nullptr, nullptr, 1, nullptr, 0), TESSERA_INVALID_ARGUMENT, "tensor");
  tessera_problem_destroy(nullptr);
  tessera_plan_destroy(nullptr);
  tessera_bindings_destroy(nullptr);
  tessera_executor_destroy(nullptr);
}

TEST_F(CApi, RegistersTexts) {
  tessera_extra extra{sizeof(tessera_extra), "bias", TESSERA_FP16, 2};
  EXPECT_EQ(tessera_register_score("c.bias", "score + bias(at.head, at.key)", nullptr, &extra, 1), TESSERA_OK);
  EXPECT_EQ(tessera_register_score("c.slope", "score * 2.0F", "2.0F", nullptr, 0), TESSERA_OK);
  EXPECT_EQ(tessera_register_mask("c.odd", "at.key % 2 != 0", nullptr, 0), TESSERA_OK);
  ASSERT_NE(tessera::registered_score("c.bias"), nullptr);
  EXPECT_EQ(tessera::registered_score("c.bias")->extras.front(),
            (tessera::ExtraTensor{"bias", tessera::DType::fp16, 2}));
  EXPECT_EQ(tessera::registered_score("c.bias")->derivative_text, std::nullopt);
  EXPECT_EQ(tessera::registered_score("c.slope")->derivative_text, "2.0F");
  EXPECT_EQ(tessera::registered_mask("c.odd")->text, "at.key % 2 != 0");
  expect_error(tessera_register_score("c.new", "score", "", nullptr, 0), TESSERA_INVALID_ARGUMENT, "derivative_text");
  expect_error(tessera_register_score("c.bias", "score", nullptr, nullptr, 0), TESSERA_INVALID_ARGUMENT, "name");
  expect_error(tessera_register_score(nullptr, "score", nullptr, nullptr, 0), TESSERA_INVALID_ARGUMENT, "name");
  expect_error(tessera_register_mask("c.new", nullptr, nullptr, 0), TESSERA_INVALID_ARGUMENT, "text");
  expect_error(tessera_register_score("c.new", "score", nullptr, nullptr, 1), TESSERA_INVALID_ARGUMENT, "extras");
  expect_error(tessera_register_score("c.new", "score", nullptr, &extra, 5), TESSERA_INVALID_ARGUMENT, "extras");
  extra.dtype = 99;
  expect_error(tessera_register_score("c.new", "score", nullptr, &extra, 1), TESSERA_INVALID_ARGUMENT, "extras");
  extra = {sizeof(tessera_extra), nullptr, TESSERA_FP32, 1};
  expect_error(tessera_register_score("c.new", "score", nullptr, &extra, 1), TESSERA_INVALID_ARGUMENT, "extras");
  extra = {1, "bias", TESSERA_FP32, 1};
  expect_error(tessera_register_score("c.new", "score", nullptr, &extra, 1), TESSERA_INVALID_ARGUMENT,
               "extras.struct_size");
}

TEST_F(CApi, StructsAreSized) {
  const std::int64_t shape[] = {1, 4, 1, 8};
  struct {
    tessera_tensor tensor;
    std::int64_t newer;
  } grown{};
  ASSERT_EQ(tessera_tensor_contiguous(&grown.tensor, memory_[0], TESSERA_FP32, shape, 4), TESSERA_OK);
  grown.tensor.struct_size = sizeof grown;
  EXPECT_EQ(tessera_bindings_set(bindings_, "q", &grown.tensor), TESSERA_OK);
  grown.newer = 7;
  expect_error(tessera_bindings_set(bindings_, "q", &grown.tensor), TESSERA_UNSUPPORTED, "q");
  grown.tensor.struct_size = 8;
  expect_error(tessera_bindings_set(bindings_, "q", &grown.tensor), TESSERA_INVALID_ARGUMENT, "q.struct_size");
  tessera_score_function score{};
  expect_error(tessera_bindings_set_score(bindings_, &score), TESSERA_INVALID_ARGUMENT, "score.struct_size");
  tessera_mask_function mask{};
  expect_error(tessera_bindings_set_mask(bindings_, &mask), TESSERA_INVALID_ARGUMENT, "mask.struct_size");
}

TEST_F(CApi, BadTensorsAreErrors) {
  const std::int64_t shape[] = {1, 4, 1, 8};
  tessera_tensor tensor;
  ASSERT_EQ(tessera_tensor_contiguous(&tensor, memory_[0], TESSERA_FP32, shape, 4), TESSERA_OK);
  tensor.rank = 7;
  expect_error(tessera_bindings_set(bindings_, "q", &tensor), TESSERA_INVALID_ARGUMENT, "q");
  tensor.rank = 4;
  tensor.dtype = 12;
  expect_error(tessera_bindings_set(bindings_, "q", &tensor), TESSERA_INVALID_ARGUMENT, "q");
  tensor.dtype = TESSERA_FP32;
  tensor.device_type = 2;
  expect_error(tessera_bindings_set(bindings_, "q", &tensor), TESSERA_INVALID_ARGUMENT, "q");
  expect_error(tessera_tensor_contiguous(&tensor, nullptr, TESSERA_FP32, nullptr, 2), TESSERA_INVALID_ARGUMENT,
               "shape");
}

TEST_F(CApi, RunsInTheCallersWorkspaceAndReportsBadCalls) {
  std::size_t bytes = 0;
  ASSERT_EQ(tessera_plan_workspace_bytes(plan_, &bytes), TESSERA_OK);
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, (bytes + 127) / 64 * 64), &std::free);
  tessera_executor* executor = nullptr;
  if (bytes > 0) {
    expect_error(tessera_executor_create_with_workspace(plan_, memory.get(), bytes - 1, &executor),
                 TESSERA_INVALID_ARGUMENT, "workspace");
  }
  ASSERT_EQ(tessera_executor_create_with_workspace(plan_, memory.get(), bytes, &executor), TESSERA_OK);
  expect_error(tessera_executor_run(executor, bindings_, nullptr), TESSERA_INVALID_ARGUMENT, "q");
  bind_all();
  ASSERT_EQ(tessera_bindings_set_offsets(bindings_, 1, 2), TESSERA_OK);
  ASSERT_EQ(tessera_bindings_set_dropout(bindings_, 1, 2), TESSERA_OK);
  ASSERT_EQ(tessera_bindings_set_score(bindings_, nullptr), TESSERA_OK);
  ASSERT_EQ(tessera_bindings_set_mask(bindings_, nullptr), TESSERA_OK);
  EXPECT_EQ(tessera_executor_run(executor, bindings_, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_NEAR(memory_[4][3], 1.3862944, 1e-5);  // zeros: the LSE of four equal scores
  ASSERT_EQ(tessera_bindings_set(bindings_, "lse", nullptr), TESSERA_OK);
  expect_error(tessera_executor_run(executor, bindings_, nullptr), TESSERA_INVALID_ARGUMENT, "lse");
  tessera_executor_destroy(executor);
}

TEST_F(CApi, TakesDlpack) {
  bind_all();
  std::int64_t shape[] = {1, 4, 1, 8};
  DLTensor q{memory_[0], {1, 0}, 4, {2, 32, 1}, shape, nullptr, 0};
  ASSERT_EQ(tessera_bindings_set_dlpack(bindings_, "q", &q), TESSERA_OK);
  tessera_executor* executor = nullptr;
  ASSERT_EQ(tessera_executor_create(plan_, &executor), TESSERA_OK);
  EXPECT_EQ(tessera_executor_run(executor, bindings_, nullptr), TESSERA_OK) << tessera_last_error();
  q.dtype.lanes = 2;
  expect_error(tessera_bindings_set_dlpack(bindings_, "q", &q), TESSERA_INVALID_ARGUMENT, "q");
  tessera_executor_destroy(executor);
}

TEST_F(CApi, ErrorsBelongToTheirThread) {
  tessera_problem* problem = nullptr;
  (void)tessera_problem_parse("attention", &problem);
  int code = -1;
  std::thread([&code] { code = tessera_last_error_code(); }).join();
  EXPECT_EQ(code, TESSERA_OK);
  EXPECT_EQ(tessera_last_error_code(), TESSERA_PARSE);
}

TEST(CApiCodes, HaveNames) {
  EXPECT_STREQ(tessera_code_name(TESSERA_OK), "ok");
  EXPECT_STREQ(tessera_code_name(TESSERA_PARSE), "parse error");
  EXPECT_STREQ(tessera_code_name(TESSERA_OUT_OF_MEMORY), "out of memory");
  EXPECT_STREQ(tessera_code_name(77), "unknown error");
}

TEST(CApiViolation, SlotAndSequenceOfAStatusWord) {
  const int page_table = static_cast<int>(tessera::Slot::page_table) + 1;
  std::array<char, 32> slot{};
  std::size_t needed = 99;
  std::int64_t sequence = -1;
  ASSERT_EQ(tessera_violation_of(7 * 256 + page_table, slot.data(), slot.size(), &needed, &sequence), TESSERA_OK);
  EXPECT_STREQ(slot.data(), "page_table");
  EXPECT_EQ(needed, 10U);
  EXPECT_EQ(sequence, 7);
  ASSERT_EQ(tessera_violation_of(0, slot.data(), slot.size(), &needed, nullptr), TESSERA_OK);
  EXPECT_STREQ(slot.data(), "");
  EXPECT_EQ(needed, 0U);
}

}  // namespace
