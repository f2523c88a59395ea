// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>

#include "arrays/array.h"
#include "arrays/parts.h"
#include "callables.h"
#include "cuda/driver/device.h"
#include "cuda/jit/compile.h"
#include "plan/implementations.h"
#include "problem.h"
#include "tessera/error.h"
#include "torch/versions.h"
#include "workspace_pool.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

constexpr std::size_t kSlots = static_cast<std::size_t>(Slot::count_);
constexpr std::size_t kMostKnown = 8;

std::size_t bytes_of(const Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype); }

Plan made_of(const PlanArguments& arguments) {
  const auto& [problem, wishes, threads, isa, device] = arguments;
  return make_plan(problem, device < 0 ? Target::cpu(threads, isa) : Target::cuda_device(device),
                   Wishes::parse(wishes));
}

/// Runs the handlers of signals that have come, on the thread that Python runs them on, the process's first. Whether
/// one raised: KeyboardInterrupt by default. Its exception then waits in this thread.
bool signal_raised(void* /*user*/) {
  if (gettid() != getpid()) return false;
  const nb::gil_scoped_acquire acquired;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

/// The arrays of one run; they and their memory are kept until it ends.
class Arrays {
 public:
  Arrays(const detail::SlotRules& rules, const std::vector<Slot>& slots, nb::handle arrays, const Place& place,
         Bindings& bindings) {
    const auto items = nb::steal<nb::tuple>(PySequence_Tuple(arrays.ptr()));
    if (!items.is_valid()) nb::raise_python_error();
    if (items.size() != slots.size()) {
      throw Error(ErrorCode::invalid_argument, "arrays", std::to_string(items.size()) + " arrays",
                  std::to_string(slots.size()) + ", one for each slot");
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      PyObject* item = PyTuple_GetItem(items.ptr(), static_cast<Py_ssize_t>(i));
      if (item == Py_None) continue;
      if ((slots[i] == Slot::o_parts || slots[i] == Slot::lse_parts) && PyTuple_Check(item)) {
        bindings[slots[i]] = parts_.emplace_back(item, to_string(slots[i]), place).tensor(to_string(slots[i]));
        continue;
      }
      const auto use = rules[slots[i]].written ? ArrayView::Use::write : ArrayView::Use::read;
      views_[i].emplace(item, to_string(slots[i]), use, place);
      bindings[slots[i]] = views_[i]->tensor();
      if (use == ArrayView::Use::write) written_.push_back(item);
    }
  }
  /// The objects that a run writes, valid as long as this.
  [[nodiscard]] const std::vector<PyObject*>& written() const noexcept { return written_; }

 private:
  std::array<std::optional<ArrayView>, kSlots> views_;
  std::deque<PartViews> parts_;
  std::vector<PyObject*> written_;
};

Target chip_of(const std::string& architecture, int multiprocessors) {
  if (multiprocessors < 0) {
    throw Error(ErrorCode::invalid_argument, "multiprocessors", std::to_string(multiprocessors), "0 or more");
  }
  try {
    Target target = Target::cuda(cuda::compute_capability(architecture));
    target.multiprocessors = multiprocessors;
    return target;
  } catch (const Error& error) {
    throw Error(error.code(), "target", error.got(), error.want());
  }
}

}  // namespace

Slot slot_named(nb::handle name) {
  if (!PyUnicode_Check(name.ptr())) {
    PyErr_Format(PyExc_TypeError, "slots: got %R; want names of slots", name.ptr());
    nb::raise_python_error();
  }
  const auto text = nb::cast<std::string>(name);
  const std::optional<Slot> slot = parse_slot(text);
  if (!slot) throw Error(ErrorCode::invalid_argument, "slots", "\"" + text + "\"", "the name of a slot: q, k, v, o, …");
  return *slot;
}

void check_workspace(const Tensor& workspace, Device device) {
  if (workspace.device == device && workspace.is_contiguous()) return;
  throw Error(ErrorCode::invalid_argument, "workspace", workspace.describe(),
              "a contiguous array on " + to_string(device));
}

PythonPlan::PythonPlan(PlanArguments arguments) : arguments_(std::move(arguments)), plan_(made_of(arguments_)) {}

const PythonPlan::Slots& PythonPlan::slots_of(const nb::tuple& names) {
  for (const auto& [known, slots] : known_) {
    if (known.ptr() == names.ptr()) return slots;
  }
  Slots slots;
  for (const nb::handle name : names) {
    const Slot slot = slot_named(name);
    if (std::find(slots.begin(), slots.end(), slot) != slots.end()) {
      throw Error(ErrorCode::invalid_argument, "slots", std::string(to_string(slot)) + " twice", "each slot once");
    }
    slots.push_back(slot);
  }
  if (known_.size() == kMostKnown) known_.erase(known_.begin());
  return known_.emplace_back(names, std::move(slots)).second;
}

Place PythonPlan::place_of(Stream stream) const noexcept {
  return on_gpu() ? Place{{DeviceType::cuda, plan_.target().index}, stream} : Place{};
}

std::unique_ptr<Executor> PythonPlan::take_executor(void* workspace, std::size_t bytes) {
  std::unique_ptr<Executor> executor;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      executor = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (executor == nullptr) return std::make_unique<Executor>(plan_, workspace, bytes);
  executor->use(workspace, bytes);
  return executor;
}

void PythonPlan::execute(const Bindings& bindings, const Tensor* workspace, Stream stream) {
  if (!on_gpu()) {
    const WorkspacePool::Lease lease(WorkspacePool::shared(), plan_.workspace_bytes());
    Executor(plan_, lease.data(), lease.bytes()).run(bindings);
    return;
  }
  if (workspace != nullptr || plan_.workspace_bytes() == 0) {
    void* memory = workspace == nullptr ? nullptr : workspace->bytes();
    std::unique_ptr<Executor> executor = take_executor(memory, workspace == nullptr ? 0 : bytes_of(*workspace));
    executor->run(bindings, stream);
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(executor));
  } else {
    Executor(plan_).run(bindings, stream);  // freeing device memory waits for its use
  }
}

void PythonPlan::wait_for(Stream stream) const {
  const cuda::CurrentContext context(plan_.target().index);
  cuda::check(cuda::driver().stream_synchronize(static_cast<cuda::StreamHandle>(stream.handle)), "cuStreamSynchronize");
}

void PythonPlan::compute(Bindings& bindings, const ArrayView* workspace, const Queue& queue, Lock lock) {
  bindings.interrupt.interrupted = &signal_raised;
  try {
    std::optional<nb::gil_scoped_release> released;
    if (lock == Lock::released) released.emplace();
    execute(bindings, workspace == nullptr ? nullptr : &workspace->tensor(), queue.stream);
    if (on_gpu() && queue.wait) wait_for(queue.stream);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) nb::raise_python_error();
    throw;
  }
}

void PythonPlan::run(nb::tuple slots, nb::handle arrays, const Scalars& scalars, nb::handle score, nb::handle mask,
                     const Queue& queue) {
  Callables callables(score, mask);
  if (callables.any() && plan_.implementation() != "cpu.reference") {
    throw Error(ErrorCode::unsupported, callables.name(), "a Python function for " + plan_.implementation(),
                "the name of a built-in, or wishes=\"implementation=cpu.reference\": only the oracle calls Python");
  }
  Bindings bindings;
  bindings.seed = scalars.seed;
  bindings.offset = scalars.offset;
  bindings.batch_offset = scalars.batch_offset;
  bindings.head_offset = scalars.head_offset;
  const Slots named = slots_of(slots);  // a copy: taking arrays runs Python, which may run this plan again
  const Place place = place_of(queue.stream);
  const Arrays views(plan_.state().rules, named, arrays, place, bindings);
  std::optional<ArrayView> workspace;
  if (on_gpu() && !queue.workspace.is_none()) {
    workspace.emplace(queue.workspace.ptr(), "workspace", ArrayView::Use::write, place);
    check_workspace(workspace->tensor(), place.device);
  }
  callables.bind(bindings);
  const ArrayView* memory = workspace ? &*workspace : nullptr;
  compute(bindings, memory, queue, callables.any() ? Lock::held : Lock::released);
  count_writes(views.written());
}

void define_plan(nb::module_& m) {
  nb::class_<PythonPlan>(m, "Plan", "How a problem is computed: made once, run many times.")
      .def(
          "__init__",
          [](PythonPlan* self, nb::handle problem, std::string wishes, int threads, std::string isa, int device) {
            new (self) PythonPlan({problem_of(problem), std::move(wishes), threads, std::move(isa), device});
          },
          nb::arg("problem"), nb::kw_only(), nb::arg("wishes") = "", nb::arg("threads") = 0, nb::arg("isa") = "",
          nb::arg("device") = -1,
          "problem: a Problem or its line (docs/grammar.md).\n"
          "threads: worker threads, 0 for as many as OpenMP would use. isa: one of cpu_isas(), \"\" for the best.\n"
          "device: index of a GPU, −1 for the CPU.\n"
          "Raises ValueError for a line or wish that is wrong, NotImplementedError if nothing computes it.")
      .def_prop_ro(
          "problem", [](const PythonPlan& self) { return self.plan().problem().to_string(); },
          "The problem's line in its shortest form.")
      .def_prop_ro(
          "implementation", [](const PythonPlan& self) { return self.plan().implementation(); },
          "Name of the implementation chosen, \"cpu.tiled\".")
      .def_prop_ro(
          "workspace_bytes", [](const PythonPlan& self) { return self.plan().workspace_bytes(); },
          "Bytes that a run needs besides its arrays.")
      .def_prop_ro(
          "threads", [](const PythonPlan& self) { return self.plan().target().threads; }, "Worker threads.")
      .def_prop_ro(
          "isa", [](const PythonPlan& self) { return self.plan().target().isa; }, "Instruction set.")
      .def(
          "explain", [](const PythonPlan& self) { return self.plan().explain(); },
          "Lines of text: problem, target, what was chosen, and why every other implementation was refused.")
      .def(
          "run",
          [](PythonPlan& self, nb::tuple slots, nb::handle arrays, std::uint64_t seed, std::uint64_t offset,
             std::int64_t batch_offset, std::int64_t head_offset, nb::handle score, nb::handle mask,
             std::uintptr_t stream, nb::handle workspace, bool wait) {
            self.run(std::move(slots), arrays, {seed, offset, batch_offset, head_offset}, score, mask,
                     {{reinterpret_cast<void*>(stream)}, workspace, wait});
          },
          nb::arg("slots"), nb::arg("arrays"), nb::arg("seed") = 0, nb::arg("offset") = 0, nb::arg("batch_offset") = 0,
          nb::arg("head_offset") = 0, nb::arg("score").none() = nb::none(), nb::arg("mask").none() = nb::none(),
          nb::arg("stream") = 0, nb::arg("workspace").none() = nb::none(), nb::arg("wait") = false,
          "Binds arrays[i] to the slot named slots[i] and computes; outputs are written in place, nothing is copied.\n"
          "The interpreter lock is released, unless score or mask is a Python function (cpu.reference only).\n"
          "On the CPU a signal whose handler raises, Ctrl-C for one, ends the run: what it writes then holds "
          "anything.\n"
          "On a GPU: queued on `stream`, a CUstream (0: the legacy default), in `workspace`, an array of at least\n"
          "workspace_bytes there (None: memory allocated for this run); wait: returns when it is done.")
      .def("__getstate__",
           [](const PythonPlan& self) {
             const auto& [problem, wishes, threads, isa, device] = self.arguments();
             return PlanState(problem.to_string(), wishes, threads, isa, device);
           })
      .def("__setstate__",
           [](PythonPlan* self, const PlanState& state) {
             const auto& [problem, wishes, threads, isa, device] = state;
             new (self) PythonPlan({Problem::parse(problem), wishes, threads, isa, device});
           })
      .def("__repr__", [](const PythonPlan& self) {
        return "<tessera plan: " + self.plan().problem().to_string() + " by " + self.plan().implementation() + ">";
      });
  m.def(
      "explain_for",
      [](nb::handle problem, const std::string& architecture, int multiprocessors, const std::string& wishes) {
        return make_plan(problem_of(problem), chip_of(architecture, multiprocessors), Wishes::parse(wishes)).explain();
      },
      nb::arg("problem"), nb::arg("target"), nb::arg("multiprocessors") = 0, nb::arg("wishes") = "",
      "Plan.explain for a GPU that need not be there: target is \"sm_120f\", multiprocessors 0 for an unknown number.");
  m.def(
      "free_workspaces", [] { WorkspacePool::shared().clear(); },
      "Frees the workspaces kept for later runs (at most 256 MiB).");
}

}  // namespace tessera::python
