// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays/array.h"
#include "tessera/executor.h"
#include "tessera/plan.h"

namespace tessera::python {

/// What Bindings hold besides tensors.
struct Scalars {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
};

/// Where a run on a GPU is queued; means nothing on the CPU.
struct Queue {
  Stream stream;
  nanobind::handle workspace;  // an array of at least workspace_bytes on the plan's device; None: allocated for the run
  bool wait = false;           // for the run's end
};

/// What a plan is made of, anew where it is copied or unpickled.
struct PlanArguments {
  Problem problem;
  std::string wishes;
  int threads = 0;
  std::string isa;
  int device = -1;  // index of a GPU; −1: the CPU
};
/// Slot of this name, of a `str`. Throws Error, python_error with a TypeError for what is no text.
Slot slot_named(nanobind::handle name);
/// Throws Error for a workspace that is not contiguous or not on the device.
void check_workspace(const Tensor& workspace, Device device);

/// The same as Python pickles it, the problem as its line.
using PlanState = std::tuple<std::string, std::string, int, std::string, int>;

/// A plan as Python sees it: made from a problem, run on arrays by the names of their slots. Many threads may
/// run one plan at once; each run leases its workspace.
class PythonPlan {
 public:
  explicit PythonPlan(PlanArguments arguments);

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  /// What the constructor was given.
  [[nodiscard]] const PlanArguments& arguments() const noexcept { return arguments_; }
  /// Binds arrays[i] to slots[i] (None: nothing) and runs with the interpreter lock released, unless a Python function
  /// takes part. Throws Error before anything is written.
  void run(nanobind::tuple slots, nanobind::handle arrays, const Scalars& scalars, nanobind::handle score,
           nanobind::handle mask, const Queue& queue);
  /// The interpreter lock during a run: held where a Python function takes part.
  enum class Lock : bool { held, released };
  /// Runs with bindings whose arrays the caller keeps; `workspace` is the view of queue.workspace, nullptr for none.
  void compute(Bindings& bindings, const ArrayView* workspace, const Queue& queue, Lock lock);
  /// The same without Python: nothing of it is asked, and the lock may be held or not. Of a GPU, `workspace` are at
  /// least workspace_bytes there, or nullptr for memory that this run allocates.
  void execute(const Bindings& bindings, const Tensor* workspace, Stream stream);
  /// Where a run queued on the stream takes its arrays.
  [[nodiscard]] Place place_of(Stream stream) const noexcept;
  [[nodiscard]] bool on_gpu() const noexcept { return plan_.target().device == DeviceType::cuda; }

 private:
  void wait_for(Stream stream) const;
  std::unique_ptr<Executor> take_executor(void* workspace, std::size_t bytes);
  using Slots = std::vector<Slot>;
  const Slots& slots_of(const nanobind::tuple& names);

  PlanArguments arguments_;
  Plan plan_;
  // Parsed tuples of names, by identity: callers pass the same few tuples again and again.
  std::vector<std::pair<nanobind::tuple, Slots>> known_;
  // Executors that no run holds: each has found its kernels. Of a GPU only.
  std::mutex mutex_;
  std::vector<std::unique_ptr<Executor>> idle_;
};

void define_plan(nanobind::module_& m);

}  // namespace tessera::python
