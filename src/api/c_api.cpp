// SPDX-License-Identifier: Apache-2.0
// The C ABI over the C++ calls: handles, sized structs, and errors turned into codes.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "cuda/driver/driver.h"
#include "tessera/callable.h"
#include "tessera/cuda.h"
#include "tessera/error.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tessera/tessera.h"
#include "tessera/version.h"

struct tessera_problem {
  tessera::Problem problem;
};

struct tessera_plan {
  tessera::Plan plan;
};

struct tessera_bindings {
  tessera::Bindings bindings;
  // What the trampolines below call; they get a pointer to these as their user data.
  tessera_score_function score{};
  tessera_mask_function mask{};
  int (*interrupted)(void* user) = nullptr;
  void* interrupt_user = nullptr;
};

struct tessera_executor {
  tessera::Executor executor;
};

namespace {

using tessera::Error;
using tessera::ErrorCode;

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

int fail(int code, const char* text, const std::string& argument) noexcept {
  last_error.code = code;
  try {
    last_error.text = text;
    last_error.argument = argument;
  } catch (const std::bad_alloc&) {
    last_error.text.clear();  // the code is all there is room for
    last_error.argument.clear();
  }
  return code;
}

/// Runs `call`; an exception becomes a code and the thread's last error.
template <class Call>
int guarded(Call&& call) noexcept {
  try {
    call();
    return TESSERA_OK;
  } catch (const Error& error) {
    return fail(static_cast<int>(error.code()), error.what(), error.argument());
  } catch (const std::bad_alloc&) {
    return fail(TESSERA_OUT_OF_MEMORY, "memory: got none; want the allocation to succeed", "memory");
  } catch (const std::exception& error) {
    return fail(TESSERA_INTERNAL, error.what(), "internal");
  } catch (...) {
    return fail(TESSERA_INTERNAL, "internal: got an unknown exception; want none", "internal");
  }
}

template <class T>
T& required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw Error(ErrorCode::invalid_argument, argument, "NULL", "a pointer");
  return *pointer;
}

/// A copy of a sized struct, members that the caller does not know zero. Members that this library does not know must
/// be zero.
template <class T>
T sized(const T* given, const char* argument) {
  const std::size_t size = required(given, argument).struct_size;
  constexpr std::size_t kFirstVersion = sizeof(T);
  if (size < kFirstVersion || size > 4096) {
    throw Error(ErrorCode::invalid_argument, std::string(argument) + ".struct_size", std::to_string(size),
                std::to_string(sizeof(T)));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    throw Error(ErrorCode::unsupported, argument, "members of a newer version",
                "those of version " + std::string(tessera::version()));
  }
  return *given;
}

void write_text(const std::string& text, char* buffer, std::size_t size, std::size_t* needed) noexcept {
  if (needed != nullptr) *needed = text.size();
  if (buffer == nullptr || size == 0) return;
  const std::size_t count = std::min(text.size(), size - 1);
  std::memcpy(buffer, text.data(), count);
  buffer[count] = '\0';
}

tessera::DeviceType device_type(std::int32_t value, const char* argument) {
  if (value == TESSERA_CPU) return tessera::DeviceType::cpu;
  if (value == TESSERA_CUDA) return tessera::DeviceType::cuda;
  throw Error(ErrorCode::invalid_argument, argument, "device type " + std::to_string(value), "0 (cpu) or 1 (cuda)");
}

tessera::DType dtype_of(int value, const char* argument) {
  if (value < TESSERA_FP64 || value > TESSERA_UINT64) {
    throw Error(ErrorCode::invalid_argument, argument, "dtype " + std::to_string(value), "one of TESSERA_FP64 …");
  }
  return static_cast<tessera::DType>(value);
}

tessera::Tensor tensor_of(const tessera_tensor* given, const char* argument) {
  const tessera_tensor from = sized(given, argument);
  const tessera::Device device{device_type(from.device_type, argument), from.device_index};
  if (from.rank < 0 || from.rank > TESSERA_MAX_RANK) {
    throw Error(ErrorCode::invalid_argument, argument, std::to_string(from.rank) + " dimensions", "0 to 6 dimensions");
  }
  tessera::Tensor tensor =
      tessera::Tensor::contiguous(from.data, dtype_of(from.dtype, argument), from.shape, from.rank, device);
  std::copy(from.strides, from.strides + from.rank, tensor.strides.begin());
  tensor.byte_offset = from.byte_offset;
  return tensor;
}

/// A chip's plan may be asked for where there is no GPU, so the driver is asked for what only it knows.
tessera::Target cuda_target_of(const tessera_target& from) {
  const auto check = [](std::int64_t value, const char* member, std::int64_t least) {
    if (value >= least) return;
    throw Error(ErrorCode::invalid_argument, std::string("target.") + member, std::to_string(value),
                std::to_string(least) + " or more");
  };
  check(from.sm, "sm", 0);
  check(from.multiprocessors, "multiprocessors", 0);
  check(from.shared_memory, "shared_memory", 0);
  check(from.device_index, "device_index", -1);
  const bool has_gpu = tessera::cuda::driver_version_or_zero() > 0 && !tessera::cuda::devices().empty();
  const auto present = [&from] { return tessera::Target::cuda_device(from.device_index); };
  tessera::Target target = from.sm == 0 ? present() : tessera::Target::cuda(from.sm);
  if (has_gpu) {
    const tessera::Target gpu = present();
    target.index = gpu.index;
    if (from.emulated != 0 || target.sm == gpu.sm) target.multiprocessors = gpu.multiprocessors;
    if (target.sm == gpu.sm) target.shared_memory = gpu.shared_memory;
  } else {
    target.index = std::max(from.device_index, 0);
  }
  if (from.shared_memory > 0) target.shared_memory = from.shared_memory;
  if (from.multiprocessors > 0) target.multiprocessors = from.multiprocessors;
  target.emulated = from.emulated != 0;
  return target;
}

tessera::Target target_of(const tessera_target* given) {
  if (given == nullptr) return tessera::Target::cpu();
  const tessera_target from = sized(given, "target");
  if (device_type(from.device_type, "target") == tessera::DeviceType::cuda) return cuda_target_of(from);
  return tessera::Target::cpu(from.threads, from.isa != nullptr ? from.isa : "");
}

tessera::Wishes wishes_of(const char* text) { return tessera::Wishes::parse(text != nullptr ? text : ""); }

tessera::Slot slot_of(const char* name) {
  const auto slot = tessera::parse_slot(&required(name, "slot"));
  if (!slot) throw Error(ErrorCode::invalid_argument, "slot", "\"" + std::string(name) + "\"", "a slot's name");
  return *slot;
}

std::vector<tessera::ExtraTensor> extras_of(const tessera_extra* given, std::size_t count) {
  if (count > static_cast<std::size_t>(tessera::kMaxExtras)) {
    throw Error(ErrorCode::invalid_argument, "extras", std::to_string(count) + " tensors",
                "at most " + std::to_string(tessera::kMaxExtras));
  }
  std::vector<tessera::ExtraTensor> extras;
  for (std::size_t i = 0; i < count; ++i) {
    const tessera_extra from = sized(&required(given, "extras") + i, "extras");
    extras.push_back({&required(from.name, "extras"), dtype_of(from.dtype, "extras"), from.rank});
  }
  return extras;
}

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
      return tessera::TileClass::partial;  // always right: every element is asked
  }
}

}  // namespace

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
  return tessera::to_string(static_cast<ErrorCode>(code)).data();  // of literals, so terminated
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

int tessera_register_score(const char* name, const char* text, const tessera_extra* extras, size_t count) {
  return guarded([&] {
    tessera::register_score(&required(name, "name"), {&required(text, "text"), extras_of(extras, count)});
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
