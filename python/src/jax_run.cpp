// SPDX-License-Identifier: Apache-2.0
// Runs of plans that XLA asks for, by functions that jax registers (jax.ffi). No Python is involved in a call.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cfenv>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host_operations.h"
#include "jax/call.h"
#include "plan.h"
#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

constexpr int kCpu = -1;
constexpr std::size_t kMostRuns = 4096;

/// Where an argument goes, and the type that its last dimension of two uint32 words is seen as, if any: jax has no
/// integers of 64 bits unless it is told to.
struct Argument {
  Slot slot = Slot::count_;  // count_: nowhere
  std::optional<DType> words;
};

/// What a call's attributes say, found again in later calls.
struct Run {
  Run(PlanArguments arguments, std::vector<Argument> inputs, std::vector<Slot> outputs)
      : plan(std::move(arguments)), inputs(std::move(inputs)), outputs(std::move(outputs)) {}
  PythonPlan plan;
  std::vector<Argument> inputs;
  std::vector<Slot> outputs;
};

template <class Take>
void each_word(std::string_view text, Take take) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    if (end > 0) take(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

Slot slot_of(std::string_view name) {
  const std::optional<Slot> slot = parse_slot(name);
  if (!slot) throw Error(ErrorCode::internal, "slots", std::string(name), "the name of a slot");
  return *slot;
}

/// Of "q k q_offset:int64 -".
std::vector<Argument> inputs_of(std::string_view text) {
  std::vector<Argument> inputs;
  each_word(text, [&](std::string_view word) {
    Argument& input = inputs.emplace_back();
    if (word == "-") return;
    const std::size_t colon = word.find(':');
    input.slot = slot_of(word.substr(0, colon));
    if (colon != std::string_view::npos) input.words = parse_dtype(word.substr(colon + 1));
  });
  return inputs;
}

std::vector<Slot> outputs_of(std::string_view text) {
  std::vector<Slot> outputs;
  each_word(text, [&](std::string_view word) { outputs.push_back(slot_of(word)); });
  return outputs;
}

/// Runs by attributes, threads and device.
class Runs {
 public:
  std::shared_ptr<Run> find(const xla::Call& call, int threads, int device) {
    const std::string_view problem = call.text("problem"), wishes = call.text("wishes");
    const std::string_view inputs = call.text("inputs"), outputs = call.text("outputs");
    std::string key;
    for (const std::string_view part : {problem, wishes, inputs, outputs}) key.append(part).push_back('\n');
    key += std::to_string(threads) + ' ' + std::to_string(device);
    {
      const std::lock_guard lock(mutex_);
      if (const auto known = runs_.find(key); known != runs_.end()) return known->second;
    }
    auto made = std::make_shared<Run>(
        PlanArguments{Problem::parse(std::string(problem)), std::string(wishes), threads, {}, device},
        inputs_of(inputs), outputs_of(outputs));
    const std::lock_guard lock(mutex_);
    if (runs_.size() >= kMostRuns) runs_.clear();
    return runs_.emplace(std::move(key), std::move(made)).first->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Run>> runs_;
};

/// Of the process; never destroyed, because XLA's threads may outlive what is static.
Runs& runs() {
  static Runs& all = *new Runs;
  return all;
}

Tensor as_words(Tensor tensor, DType dtype) {
  if (tensor.dtype == dtype) return tensor;
  if (tensor.dtype != DType::uint32 || tensor.rank < 1 ||
      tensor.shape[static_cast<std::size_t>(tensor.rank) - 1] != 2) {
    throw Error(ErrorCode::invalid_argument, "words", tensor.describe(), "uint32 (…, 2), low word first");
  }
  return Tensor::contiguous(tensor.data, dtype, tensor.shape.data(), tensor.rank - 1, tensor.device);
}

/// While it lives, floating point computes as the standard has it. XLA's threads flush denormals to zero, which changes
/// what rounds to fp16; threads of OpenMP that a run makes inherit the state.
class StandardFloats {
 public:
  StandardFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardFloats() { std::fesetenv(&before_); }
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;

 private:
  std::fenv_t before_{};
};

void execute(const xla::Call& call, int device) {
  // Of a call: dropout's seed and offset, batch_offset, head_offset, threads.
  const std::span<const std::int64_t> scalars = call.numbers("scalars");
  if (scalars.size() != 5) throw Error(ErrorCode::internal, "scalars", std::to_string(scalars.size()), "5");
  int threads = 0;
  if (device == kCpu) threads = scalars[4] > 0 ? static_cast<int>(scalars[4]) : threads_of_calls();
  const std::shared_ptr<Run> run = runs().find(call, threads, device);
  const auto count = [](const auto& all) { return static_cast<std::int64_t>(all.size()); };
  if (call.arguments() != count(run->inputs) || call.results() != count(run->outputs)) {
    throw Error(ErrorCode::internal, "slots", "another number", "one for each argument and result");
  }
  const Device where = device == kCpu ? Device{} : Device{DeviceType::cuda, device};
  Bindings bindings;
  bindings.seed = static_cast<std::uint64_t>(scalars[0]);
  bindings.offset = static_cast<std::uint64_t>(scalars[1]);
  bindings.batch_offset = scalars[2];
  bindings.head_offset = scalars[3];
  for (std::int64_t i = 0; i < call.arguments(); ++i) {
    const Argument& input = run->inputs[static_cast<std::size_t>(i)];
    if (input.slot == Slot::count_) continue;
    const Tensor tensor = call.argument(i, where);
    bindings[input.slot] = input.words ? as_words(tensor, *input.words) : tensor;
  }
  for (std::int64_t i = 0; i < call.results(); ++i) {
    bindings[run->outputs[static_cast<std::size_t>(i)]] = call.result(i, where);
  }
  if (device == kCpu) {
    const StandardFloats standard;
    run->plan.execute(bindings, nullptr, {});
    return;
  }
  const std::size_t bytes = run->plan.plan().workspace_bytes();
  const xla::Call::Scratch scratch(call, bytes);
  const auto size = static_cast<std::int64_t>(bytes);
  const Tensor workspace = Tensor::contiguous(scratch.data(), DType::uint8, {size}, where);
  run->plan.execute(bindings, &workspace, {call.stream()});
}

xla::Failure* handle(xla::CallFrame* frame, bool on_gpu) noexcept {
  using xla::Code;
  if (xla::tell_metadata(*frame) || frame->stage != xla::Stage::execute) return nullptr;
  try {
    const xla::Call call(*frame);
    execute(call, on_gpu ? call.ordinal() : kCpu);
    return nullptr;
  } catch (const Error& error) {
    const bool defect = error.code() == ErrorCode::internal;
    const Code code = error.code() == ErrorCode::unsupported ? Code::unimplemented
                      : defect                               ? Code::internal
                                                             : Code::invalid_argument;
    return xla::failure_of(*frame, code, error.what());
  } catch (const std::bad_alloc&) {
    return xla::failure_of(*frame, Code::resource_exhausted, "tessera: no memory for the workspace");
  } catch (const std::exception& error) {
    return xla::failure_of(*frame, Code::internal, error.what());
  }
}

xla::Failure* run_on_cpu(xla::CallFrame* frame) noexcept { return handle(frame, false); }
xla::Failure* run_on_gpu(xla::CallFrame* frame) noexcept { return handle(frame, true); }

nb::capsule capsule_of(xla::Failure* (*handler)(xla::CallFrame*) noexcept) {
  return {reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET"};
}

}  // namespace

void define_jax_run(nb::module_& m) {
  m.def(
      "ffi_handlers", [] { return nb::make_tuple(capsule_of(&run_on_cpu), capsule_of(&run_on_gpu)); },
      "(for CPUs, for CUDA): functions for jax.ffi.register_ffi_target, which run a plan on XLA's buffers.\n"
      "Attributes: problem, wishes, inputs, outputs (texts; slots separated by spaces, `-` for what is not bound,\n"
      "`slot:int64` for uint32 words), scalars (int64: seed, offset, batch_offset, head_offset, threads).");
}

}  // namespace tessera::python
