// SPDX-License-Identifier: Apache-2.0
// The C ABI over the C++ calls: handles, sized structs, and errors turned into codes.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "api/c_values.h"
#include "tessera/callable.h"
#include "tessera/error.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tessera/tessera.h"
#include "tessera/version.h"

struct tessera_plan {
  tessera::Plan plan;
};

struct tessera_executor {
  tessera::Executor executor;
};

namespace {

using tessera::ErrorCode;
using namespace tessera::c_abi;

static_assert(TESSERA_CANCELLED == static_cast<int>(ErrorCode::cancelled));
static_assert(TESSERA_INTERNAL == static_cast<int>(ErrorCode::internal));
static_assert(TESSERA_UINT64 == static_cast<int>(tessera::DType::uint64));
static_assert(TESSERA_BF16 == static_cast<int>(tessera::DType::bf16));
static_assert(TESSERA_MAX_RANK == tessera::Tensor::kMaxRank);
static_assert(TESSERA_TILE_FULL == static_cast<int>(tessera::TileClass::full));

struct LastError {
  int code = TESSERA_OK;
  std::string text;
  std::string argument;
};
thread_local LastError last_error;

tessera_score_point point_of(const tessera::ScorePoint& at) noexcept { return {at.batch, at.head, at.query, at.key}; }

double call_score_value(double score, const tessera::ScorePoint& at, void* user) {
  const auto& function = *static_cast<const tessera_score_function*>(user);
  const tessera_score_point point = point_of(at);
  return function.value(score, &point, function.user);
}

double call_score_derivative(double score, const tessera::ScorePoint& at, void* user) {
  const auto& function = *static_cast<const tessera_score_function*>(user);
  const tessera_score_point point = point_of(at);
  return function.derivative(score, &point, function.user);
}

bool call_mask_visible(const tessera::ScorePoint& at, void* user) {
  const auto& function = *static_cast<const tessera_mask_function*>(user);
  const tessera_score_point point = point_of(at);
  return function.visible(&point, function.user) != 0;
}

bool call_interrupted(void* user) {
  const auto& bindings = *static_cast<const tessera_bindings*>(user);
  return bindings.interrupted(bindings.interrupt_user) != 0;
}

tessera::TileClass call_mask_classify(const tessera::TileBounds& tile, void* user) {
  const auto& function = *static_cast<const tessera_mask_function*>(user);
  const tessera_tile_bounds bounds{tile.batch,     tile.head,      tile.query_begin,
                                   tile.query_end, tile.key_begin, tile.key_end};
  switch (function.classify(&bounds, function.user)) {
    case TESSERA_TILE_NONE:
      return tessera::TileClass::none;
    case TESSERA_TILE_FULL:
      return tessera::TileClass::full;
    default:
      return tessera::TileClass::partial;  // always correct: every element is tested then
  }
}

}  // namespace

namespace tessera::c_abi {

int fail(int code, const char* text, const std::string& argument) noexcept {
  last_error.code = code;
  try {
    last_error.text = text;
    last_error.argument = argument;
  } catch (const std::bad_alloc&) {
    last_error.text.clear();  // there is no memory for more than the code
    last_error.argument.clear();
  }
  return code;
}

void write_text(const std::string& text, char* buffer, std::size_t size, std::size_t* needed) noexcept {
  if (needed != nullptr) *needed = text.size();
  if (buffer == nullptr || size == 0) return;
  const std::size_t count = std::min(text.size(), size - 1);
  std::memcpy(buffer, text.data(), count);
  buffer[count] = '\0';
}

}  // namespace tessera::c_abi

const char* tessera_version(void) { return tessera::version(); }

int tessera_build_info(char* buffer, size_t size, size_t* needed) {
  return guarded([&] { write_text(tessera::build_info(), buffer, size, needed); });
}

int tessera_cpu_isas(char* buffer, size_t size, size_t* needed) {
  return guarded([&] {
    std::string text;
    for (const std::string& isa : tessera::cpu_isas()) text.append(text.empty() ? "" : " ").append(isa);
    write_text(text, buffer, size, needed);
  });
}

const char* tessera_last_error(void) { return last_error.text.c_str(); }
const char* tessera_last_error_argument(void) { return last_error.argument.c_str(); }
int tessera_last_error_code(void) { return last_error.code; }

const char* tessera_code_name(int code) {
  if (code == TESSERA_OK) return "ok";
  if (code == TESSERA_OUT_OF_MEMORY) return "out of memory";
  return tessera::to_string(static_cast<ErrorCode>(code)).data();  // a view of a literal, so it is terminated
}

int tessera_tensor_contiguous(tessera_tensor* tensor, void* data, int dtype, const int64_t* shape, int rank) {
  return guarded([&] {
    tessera_tensor& out = required(tensor, "tensor");
    if (rank > 0) (void)required(shape, "shape");
    const tessera::Tensor view = tessera::Tensor::contiguous(data, dtype_of(dtype, "dtype"), shape, rank);
    out = tessera_tensor{};
    out.struct_size = sizeof(tessera_tensor);
    out.data = data;
    out.dtype = dtype;
    out.rank = rank;
    std::copy(view.shape.begin(), view.shape.end(), out.shape);
    std::copy(view.strides.begin(), view.strides.end(), out.strides);
  });
}

int tessera_register_score(const char* name, const char* text, const char* derivative_text, const tessera_extra* extras,
                           size_t count) {
  return guarded([&] {
    tessera::ScoreText score{&required(text, "text"), extras_of(extras, count)};
    if (derivative_text != nullptr) score.derivative_text = derivative_text;
    tessera::register_score(&required(name, "name"), std::move(score));
  });
}

int tessera_register_mask(const char* name, const char* text, const tessera_extra* extras, size_t count) {
  return guarded([&] {
    tessera::register_mask(&required(name, "name"), {&required(text, "text"), extras_of(extras, count)});
  });
}

int tessera_problem_parse(const char* text, tessera_problem** problem) {
  return guarded([&] {
    required(problem, "problem") = nullptr;
    *problem = new tessera_problem{tessera::Problem::parse(&required(text, "text"))};
  });
}

int tessera_problem_to_string(const tessera_problem* problem, char* buffer, size_t size, size_t* needed) {
  return guarded([&] { write_text(required(problem, "problem").problem.to_string(), buffer, size, needed); });
}

void tessera_problem_destroy(tessera_problem* problem) { delete problem; }

int tessera_plan_make(const tessera_problem* problem, const tessera_target* target, const char* wishes,
                      tessera_plan** plan) {
  return guarded([&] {
    required(plan, "plan") = nullptr;
    *plan = new tessera_plan{
        tessera::make_plan(required(problem, "problem").problem, target_of(target), wishes_of(wishes))};
  });
}

int tessera_supports(const tessera_problem* problem, const tessera_target* target, const char* wishes, int* supported,
                     char* reason, size_t size, size_t* needed) {
  return guarded([&] {
    const tessera::Support support =
        tessera::supports(required(problem, "problem").problem, target_of(target), wishes_of(wishes));
    required(supported, "supported") = support.ok ? 1 : 0;
    write_text(support.reason, reason, size, needed);
  });
}

int tessera_plan_explain(const tessera_plan* plan, char* buffer, size_t size, size_t* needed) {
  return guarded([&] { write_text(required(plan, "plan").plan.explain(), buffer, size, needed); });
}

int tessera_plan_implementation(const tessera_plan* plan, char* buffer, size_t size, size_t* needed) {
  return guarded([&] { write_text(required(plan, "plan").plan.implementation(), buffer, size, needed); });
}

int tessera_plan_workspace_bytes(const tessera_plan* plan, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = required(plan, "plan").plan.workspace_bytes(); });
}

void tessera_plan_destroy(tessera_plan* plan) { delete plan; }

int tessera_bindings_create(tessera_bindings** bindings) {
  return guarded([&] {
    required(bindings, "bindings") = nullptr;
    *bindings = new tessera_bindings{};
  });
}

int tessera_bindings_set(tessera_bindings* bindings, const char* slot, const tessera_tensor* tensor) {
  return guarded([&] {
    required(bindings, "bindings").bindings[slot_of(slot)] =
        tensor != nullptr ? tensor_of(tensor, slot) : tessera::Tensor{};
  });
}

int tessera_bindings_set_dlpack(tessera_bindings* bindings, const char* slot, const struct DLTensor* tensor) {
  return guarded([&] {
    required(bindings, "bindings").bindings[slot_of(slot)] =
        tessera::Tensor::from_dlpack(required(tensor, "tensor"), slot);
  });
}

int tessera_bindings_set_offsets(tessera_bindings* bindings, int64_t batch_offset, int64_t head_offset) {
  return guarded([&] {
    required(bindings, "bindings").bindings.batch_offset = batch_offset;
    bindings->bindings.head_offset = head_offset;
  });
}

int tessera_bindings_set_dropout(tessera_bindings* bindings, uint64_t seed, uint64_t offset) {
  return guarded([&] {
    required(bindings, "bindings").bindings.seed = seed;
    bindings->bindings.offset = offset;
  });
}

int tessera_bindings_set_score(tessera_bindings* bindings, const tessera_score_function* score) {
  return guarded([&] {
    tessera_bindings& to = required(bindings, "bindings");
    to.score = score != nullptr ? sized(score, "score") : tessera_score_function{};
    to.bindings.score = {to.score.value != nullptr ? call_score_value : nullptr,
                         to.score.derivative != nullptr ? call_score_derivative : nullptr, &to.score};
  });
}

int tessera_bindings_set_mask(tessera_bindings* bindings, const tessera_mask_function* mask) {
  return guarded([&] {
    tessera_bindings& to = required(bindings, "bindings");
    to.mask = mask != nullptr ? sized(mask, "mask") : tessera_mask_function{};
    to.bindings.mask = {to.mask.visible != nullptr ? call_mask_visible : nullptr,
                        to.mask.classify != nullptr ? call_mask_classify : nullptr, &to.mask};
  });
}

int tessera_bindings_set_interrupt(tessera_bindings* bindings, int (*interrupted)(void* user), void* user) {
  return guarded([&] {
    tessera_bindings& to = required(bindings, "bindings");
    to.interrupted = interrupted;
    to.interrupt_user = user;
    to.bindings.interrupt = {interrupted != nullptr ? call_interrupted : nullptr, &to};
  });
}

void tessera_bindings_destroy(tessera_bindings* bindings) { delete bindings; }

int tessera_executor_create(const tessera_plan* plan, tessera_executor** executor) {
  return guarded([&] {
    required(executor, "executor") = nullptr;
    *executor = new tessera_executor{tessera::Executor(required(plan, "plan").plan)};
  });
}

int tessera_executor_create_with_workspace(const tessera_plan* plan, void* workspace, size_t bytes,
                                           tessera_executor** executor) {
  return guarded([&] {
    required(executor, "executor") = nullptr;
    *executor = new tessera_executor{tessera::Executor(required(plan, "plan").plan, workspace, bytes)};
  });
}

int tessera_executor_run(tessera_executor* executor, const tessera_bindings* bindings, void* stream) {
  return guarded([&] {
    required(executor, "executor").executor.run(required(bindings, "bindings").bindings, tessera::Stream{stream});
  });
}

void tessera_executor_destroy(tessera_executor* executor) { delete executor; }

int tessera_violation_of(int32_t status, char* slot, size_t size, size_t* needed, int64_t* sequence) {
  return guarded([&] {
    const auto found = tessera::violation_of(status);
    write_text(found ? std::string(tessera::to_string(found->slot)) : std::string(), slot, size, needed);
    if (sequence != nullptr) *sequence = found ? found->sequence : 0;
  });
}
