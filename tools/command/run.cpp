// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/inputs/slot_shapes.h"
#include "command/run_problem.h"
#include "files/npy.h"
#include "files/safetensors.h"
#include "options/commands.h"
#include "options/number_option.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

struct RunOptions {
  std::vector<std::string> inputs;
  std::string prefix;
  std::string output;
  std::vector<std::string> problem;
  std::vector<std::string> wishes;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  bool quiet = false;
  TargetOptions target;
};

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

void load_safetensors(const std::string& path, const RunOptions& options, const std::string& text, Arrays& arrays) {
  const files::SafetensorsFile file(path);
  bool any = false;
  for (const files::SafetensorsEntry& entry : file.header().entries) {
    if (entry.name.compare(0, options.prefix.size(), options.prefix) != 0) continue;
    const std::optional<Slot> slot = parse_slot(entry.name.substr(options.prefix.size()));
    if (!slot || !is_input(*slot, text)) continue;  // a file may hold much else
    arrays[*slot] = file.load(entry.name);
    any = true;
  }
  if (!any) {
    throw Error(ErrorCode::invalid_argument, path,
                "no tensor named " + options.prefix + "q, " + options.prefix + "k, …",
                "names of slots after the prefix (--prefix)");
  }
}

void load_npy(const std::string& name, const std::string& path, const std::string& text, Arrays& arrays) {
  const std::optional<Slot> slot = parse_slot(name);
  if (!slot || !is_input(*slot, text)) {
    throw Error(ErrorCode::invalid_argument, "--in", "'" + name + "'", "the name of an input: q, k, v, sink, …");
  }
  arrays[*slot] = files::read_npy(path);
}

Arrays load(const RunOptions& options, const std::string& text) {
  Arrays arrays;
  for (const std::string& input : options.inputs) {
    const std::size_t equals = input.find('=');
    if (ends_with(input, ".safetensors") && equals == std::string::npos) {
      load_safetensors(input, options, text, arrays);
    } else if (equals != std::string::npos && ends_with(input, ".npy")) {
      load_npy(input.substr(0, equals), input.substr(equals + 1), text, arrays);
    } else {
      throw Error(ErrorCode::invalid_argument, "--in", "'" + input + "'", "FILE.safetensors or NAME=FILE.npy");
    }
  }
  return arrays;
}

// What a run wrote: its outputs, for kv_append the cache and the rotated queries, for the linear operations the states
// and rings, or the states' gradients, and a skip state.
std::vector<Slot> result_slots(const Problem& problem, const Arrays& arrays) {
  std::vector<Slot> slots;
  for (const SlotShape& each : outputs(problem)) slots.push_back(each.slot);
  if (problem.is_linear() && problem.linear.states > 0) {
    slots.push_back(problem.pass == Pass::forward ? Slot::state : Slot::dstate_initial);
  }
  if (problem.skip) slots.push_back(Slot::tile_bits);
  if (problem.skip.kind == SkipRule::Kind::mass) slots.insert(slots.end(), {Slot::skip_memory, Slot::skip_lse});
  if (problem.linear.ring > 0) slots.insert(slots.end(), {Slot::ring_k, Slot::ring_v});
  if (problem.operation == Operation::kv_append) {
    for (const Slot slot : {Slot::k, Slot::v, Slot::q_rotated}) {
      if (arrays.count(slot) != 0) slots.push_back(slot);
    }
  }
  return slots;
}

bool drops_batch(Slot slot, const RunProblem& run) {
  switch (slot) {
    case Slot::o:
    case Slot::o_residual:
    case Slot::lse:
    case Slot::dq:
    case Slot::q_rotated:
      return run.q_without_batch;
    case Slot::k:
    case Slot::v:
    case Slot::dk:
    case Slot::dv:
      return run.kv_without_batch;
    default:
      return false;
  }
}

Tensor as_given(const files::Array& array, bool drop_batch) {
  if (!drop_batch) return array.tensor();
  return Tensor::contiguous(array.data(), array.dtype(), array.shape().data() + 1,
                            static_cast<int>(array.shape().size()) - 1);
}

void save(const RunOptions& options, const RunProblem& run, const Arrays& arrays) {
  const std::vector<Slot> slots = result_slots(run.problem, arrays);
  std::vector<files::NamedTensor> tensors;
  for (const Slot slot : slots) {
    tensors.push_back({std::string(to_string(slot)), as_given(arrays.at(slot), drops_batch(slot, run))});
  }
  if (ends_with(options.output, ".safetensors")) {
    files::write_safetensors(options.output, tensors, {{"problem", run.problem.to_string()}});
  } else if (tensors.size() == 1) {
    files::write_npy(options.output, tensors[0].tensor);
  } else {
    // o.npy, and beside it o.lse.npy, o.tile_mass.npy, …
    const std::string stem = options.output.substr(0, options.output.size() - 4);
    const bool has_o = slots[0] == Slot::o;
    for (std::size_t at = 0; at < tensors.size(); ++at) {
      const bool main_output = has_o && at == 0;
      files::write_npy(main_output ? options.output : stem + "." + tensors[at].name + ".npy", tensors[at].tensor);
    }
  }
  if (options.quiet) return;
  for (const files::NamedTensor& each : tensors) fmt::print("{:<14} {}\n", each.name, each.tensor.describe());
  fmt::print("{:<14} {}\n", "written", options.output);
}

// A backward needs o and lse, and the residual of o if it says so; where the files hold none, the forward makes them.
void complete_backward(const RunOptions& options, const Problem& backward, const Wishes& wishes, Arrays& arrays) {
  if (backward.pass != Pass::backward || backward.operation != Operation::attention) return;
  const bool residual = arrays.count(Slot::o_residual) != 0 || !backward.residual;
  if (arrays.count(Slot::o) != 0 && arrays.count(Slot::lse) != 0 && residual) return;
  Problem forward = backward;
  forward.pass = Pass::forward;
  forward.lse = true;
  forward.dlse = forward.grad_fp32 = forward.accumulate = false;
  forward.bwd_list = {};
  Arrays bound;
  for (auto& [slot, array] : arrays) {
    const bool of_backward = (slot >= Slot::o && slot <= Slot::dv) || slot == Slot::dsink || slot == Slot::dk2 ||
                             slot == Slot::dv2 || (slot >= Slot::bwd_tile_counts && slot <= Slot::bwd_full_bits);
    if (!of_backward) bound[slot] = std::move(array);
  }
  allocate_outputs(forward, bound);
  Bindings bindings = bindings_of(bound);
  bindings.seed = options.seed;
  bindings.offset = options.offset;
  Executor(make_plan(forward, options.target.target(), wishes)).run(bindings);
  for (auto& [slot, array] : bound) arrays[slot] = std::move(array);
}

void check_output(const RunOptions& options) {
  if (!ends_with(options.output, ".safetensors") && !ends_with(options.output, ".npy")) {
    throw Error(ErrorCode::invalid_argument, "--out", "'" + options.output + "'", "FILE.npy or FILE.safetensors");
  }
}

void run(const RunOptions& options) {
  check_output(options);
  const std::string text = fmt::format("{}", fmt::join(options.problem, " "));
  Arrays arrays = load(options, text);
  const RunProblem run = problem_of(arrays, text);
  const Wishes wishes = Wishes::parse(fmt::format("{}", fmt::join(options.wishes, " ")));
  const Plan plan = make_plan(run.problem, options.target.target(), wishes);
  complete_backward(options, run.problem, wishes, arrays);
  allocate_outputs(run.problem, arrays);
  if (run.problem.operation == Operation::kv_append && arrays.count(Slot::q) != 0) {
    arrays[Slot::q_rotated] = files::Array(arrays[Slot::q].dtype(), arrays[Slot::q].shape(), "q_rotated");
  }
  if (run.problem.operation == Operation::linear_chunk && run.problem.pass == Pass::backward &&
      run.problem.linear.states > 0) {
    std::vector<std::int64_t> shape = arrays[Slot::state].shape();
    shape[0] = run.problem.batch;  // gradients are by sequence, not by slot
    arrays[Slot::dstate_initial] = files::Array(DType::fp32, shape, "dstate_initial");
  }
  Bindings bindings = bindings_of(arrays);
  bindings.seed = options.seed;
  bindings.offset = options.offset;
  Executor executor(plan);
  const auto start = std::chrono::steady_clock::now();
  executor.run(bindings);
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  if (!options.quiet) {
    fmt::print("{:<14} {}\n", "problem", run.problem.to_string());
    fmt::print("{:<14} {} in {:.3f} ms\n", "computed by", plan.implementation(), elapsed.count());
  }
  save(options, run, arrays);
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  CLI::App* verb = app.add_subcommand("run", "Compute attention on tensors from files and write the result");
  auto options = std::make_shared<RunOptions>();
  verb->add_option("-i,--in", options->inputs,
                   "FILE.safetensors (tensors named q, k, v, …) or NAME=FILE.npy; repeatable")
      ->allow_extra_args(false)
      ->required();
  verb->add_option("--prefix", options->prefix, "What precedes the names in a .safetensors file, as 'layer0.'");
  verb->add_option("-o,--out", options->output, "FILE.npy or FILE.safetensors for every output of the problem")
      ->required();
  verb->add_option("words", options->problem,
                   "Words of the problem grammar; sizes, dtypes and layouts come from the tensors");
  verb->add_option("-w,--wish", options->wishes,
                   "Wishes for the plan: implementation=, tile_q=, tile_kv=, splits=, stages=, warps=, loader=")
      ->allow_extra_args(false);
  add_number(*verb, "--seed", options->seed, 0, std::numeric_limits<std::uint64_t>::max(), "Seed of dropout");
  add_number(*verb, "--offset", options->offset, 0, std::numeric_limits<std::uint64_t>::max(), "Offset of dropout");
  verb->add_flag("-q,--quiet", options->quiet, "Print nothing when all is well");
  add_target_options(*verb, options->target);
  verb->footer(R"(Examples:
  tessera run --in q=q.npy --in k=k.npy --in v=v.npy --out o.npy -- causal softcap=30
  tessera run --in model.safetensors --prefix layer0. --out o.safetensors -- causal lse mass=mean block=64x64
  tessera run --in step.safetensors --out grads.safetensors -- pass=backward causal
A backward whose files hold no o and lse runs the forward first.)");
  verb->callback([options, &exit_code] {
    run(*options);
    exit_code = kOk;
  });
}

}  // namespace tessera::cli
