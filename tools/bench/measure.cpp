// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "bench/accuracy.h"
#include "bench/device.h"
#include "bench/inputs.h"
#include "cpu/tiles/dot_keys.h"
#include "plan/implementations.h"
#include "tessera/executor.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::int64_t status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) == 0) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

// Growth of the peak of resident memory over the memory resident at the start.
class PeakMemory {
 public:
  PeakMemory() {
    std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts again from what is resident now
    start_ = status_bytes("VmRSS");
  }
  [[nodiscard]] std::int64_t growth() const { return std::max<std::int64_t>(0, status_bytes("VmHWM") - start_); }

 private:
  std::int64_t start_ = 0;
};

bool is_on_gpu(const MeasureOptions& options) { return options.target.device == DeviceType::cuda; }

bool is_of_backward(Slot slot) {
  return slot == Slot::dout || slot == Slot::dlse || (slot >= Slot::dq && slot <= Slot::dv) || slot == Slot::dsink ||
         slot == Slot::dk2 || slot == Slot::dv2 || (slot >= Slot::bwd_tile_counts && slot <= Slot::bwd_full_bits);
}

// Makes the o, its residual and the lse that a backward reads.
void run_forward(const BenchCase& bench_case, const MeasureOptions& options, Arrays& arrays) {
  Problem forward = bench_case.problem;
  forward.pass = Pass::forward;
  forward.lse = true;
  forward.dlse = forward.grad_fp32 = forward.accumulate = forward.deterministic = false;
  forward.bwd_list = {};
  BenchInputs inputs;
  for (auto& [slot, array] : arrays) {
    if (!is_of_backward(slot)) inputs.arrays.emplace(slot, std::move(array));
  }
  Wishes wishes;  // tiles and splits are wished for the backward; on the CPU an implementation for both
  if (!is_on_gpu(options)) wishes.implementation = options.wishes.implementation;
  Executor executor(make_plan(forward, options.target, wishes));
  if (is_on_gpu(options)) {
    DeviceRun run(executor, inputs, false);
    run.time(1, 0);
    for (const Slot slot : {Slot::o, Slot::o_residual, Slot::lse}) {
      if (const auto array = inputs.arrays.find(slot); array != inputs.arrays.end()) run.fetch(slot, array->second);
    }
  } else {
    executor.run(bindings_of(inputs.arrays));
  }
  for (auto& [slot, array] : inputs.arrays) arrays.at(slot) = std::move(array);
}

// Lets the threads of whoever ran last fall asleep: idle threads of OpenMP spin for some milliseconds, those of ONNX
// Runtime for fifty.
void settle() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

/// Microseconds of one call, of `calls` in a row after `warm_up` untimed ones.
using TimedCalls = std::function<double(int calls, int warm_up)>;

bool computes_by_dots(const Plan& plan) {
  const Problem& problem = plan.problem();
  return plan.implementation() == "cpu.tiled" && cpu::uses_dots(problem, cpu::kernels_for(plan.state().target.isa));
}

struct Runner {
  const MeasureOptions& options;
  double call_us = 0;  // known from a first call

  [[nodiscard]] int calls() const {
    const bool flushes = is_on_gpu(options) && !options.as_graph;
    const double each = std::max(call_us, 0.1) + (flushes ? DeviceRun::kFlushMicroseconds : 0.0);
    const double most = is_on_gpu(options) ? DeviceRun::kMostCalls : 100000.0;
    return static_cast<int>(std::clamp(std::ceil(options.batch_seconds * 1e6 / each), 1.0, most));
  }
  // After the pause short calls need their threads woken, which the kernel may leave on one core for some milliseconds,
  // and caches; a long one does not notice.
  [[nodiscard]] int wake_up_calls() const { return call_us < 200e3 ? (is_on_gpu(options) ? 1 : calls()) : 0; }
};

double time_on_host(Executor& executor, const Bindings& bindings, int calls, int warm_up) {
  for (int at = 0; at < warm_up; ++at) executor.run(bindings);
  const auto start = Clock::now();
  for (int at = 0; at < calls; ++at) executor.run(bindings);
  return microseconds_since(start) / calls;
}

// Ours, first peer, ours, second peer, … so that a drift of the machine meets both sides of a ratio alike.
void run_interleaved(BenchRow& row, const TimedCalls& run_ours, Runner ours, const std::vector<Peer*>& peers) {
  std::vector<Runner> theirs;
  for (Peer* peer : peers) theirs.push_back({ours.options, (peer->run(1, ours.options.warm_up), peer->run(1, 0))});
  std::vector<double> our_us;
  std::vector<std::vector<double>> peer_us(peers.size()), ratios(peers.size());
  for (int repetition = 0; repetition < ours.options.repetitions; ++repetition) {
    const bool pause = !peers.empty() && !is_on_gpu(ours.options);
    if (pause) settle();
    our_us.push_back(run_ours(ours.calls(), ours.wake_up_calls()));
    for (std::size_t at = 0; at < peers.size(); ++at) {
      if (pause) settle();
      peer_us[at].push_back(peers[at]->run(theirs[at].calls(), theirs[at].wake_up_calls()));
      ratios[at].push_back(peer_us[at].back() / our_us.back());
    }
  }
  row.us = Spread::of(our_us);
  row.calls = ours.calls();
  for (std::size_t at = 0; at < peers.size(); ++at) {
    row.peers[peers[at]->name()] = {Spread::of(peer_us[at]), Spread::of(ratios[at]), {}};
  }
}

void find_errors(BenchRow& row, const BenchCase& bench_case, const Arrays& arrays, const std::vector<Peer*>& peers) {
  const SampledOutput sampled(bench_case, arrays);
  const files::Array& o = arrays.at(Slot::o);
  row.error = sampled.error_of(o.tensor());
  for (Peer* peer : peers) {
    const files::Array theirs(o.dtype(), o.shape());
    if (peer->fetch_output(theirs)) row.peers[peer->name()].error = sampled.error_of(theirs.tensor());
  }
}

BenchRow describe(const BenchCase& bench_case, const MeasureOptions& options, const Plan& plan) {
  BenchRow row;
  row.problem = bench_case.text();
  row.pass = bench_case.problem.pass == Pass::forward ? "forward" : "backward";
  row.wishes = options.wishes.to_string();
  row.implementation = plan.implementation();
  const Target& target = plan.state().target;
  row.isa = target.isa;
  if (is_on_gpu(options)) row.isa = "sm_" + std::to_string(target.sm) + (target.emulated ? " emulated" : "");
  row.threads = target.threads;
  row.repetitions = options.repetitions;
  row.as_graph = options.as_graph;
  row.workspace_bytes = plan.workspace_bytes();
  return row;
}

}  // namespace

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = part * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

Spread Spread::of(const std::vector<double>& values) {
  return {quantile(values, 0.5), quantile(values, 0.1), quantile(values, 0.9)};
}

BenchRow measure(const BenchCase& bench_case, const MeasureOptions& options, const Roofline& roofline,
                 const std::vector<std::unique_ptr<Peer>>& peers) {
  BenchInputs inputs = make_inputs(bench_case, 1);
  if (bench_case.problem.operation == Operation::attention && bench_case.problem.pass == Pass::backward) {
    run_forward(bench_case, options, inputs.arrays);
  }
  const Bindings bindings = bindings_of(inputs.arrays);
  const PeakMemory memory;
  const Plan plan = make_plan(bench_case.problem, options.target, options.wishes);
  Executor executor(plan);
  BenchRow row = describe(bench_case, options, plan);
  std::unique_ptr<DeviceRun> device;
  if (is_on_gpu(options)) {
    executor.prepare();
    device = std::make_unique<DeviceRun>(executor, inputs, options.as_graph);
  } else {
    executor.run(bindings);
    row.rss_growth_bytes = memory.growth();
  }
  std::vector<double> in_place_us;
  const TimedCalls run_ours = [&](int calls, int warm_up) {
    if (!device) return time_on_host(executor, bindings, calls, warm_up);
    in_place_us.push_back(device->time_in_place(calls, warm_up));
    return device->time(calls, warm_up);
  };
  run_ours(1, std::max(0, options.warm_up - 1));
  const Runner ours{options, run_ours(1, 0)};

  std::vector<Peer*> ready;
  for (const std::unique_ptr<Peer>& peer : peers) {
    if (const auto reason = peer->set_up(bench_case, inputs.arrays, plan.target(),
                                         options.as_graph || !inputs.slots_by_call.empty(), options.accuracy)) {
      row.refusals[peer->name()] = *reason;
    } else {
      ready.push_back(peer.get());
    }
  }
  in_place_us.clear();
  run_interleaved(row, run_ours, ours, ready);
  if (options.accuracy && SampledOutput::takes(bench_case)) {
    if (device) device->fetch(Slot::o, inputs.arrays.at(Slot::o));
    find_errors(row, bench_case, inputs.arrays, ready);
  }

  const Work work = work_of(bench_case, inputs.kept);
  row.gflop = work.flops * 1e-9;
  row.gbyte = work.bytes * 1e-9;
  row.tflops = work.flops / row.us.median * 1e-6;
  row.gbytes_s = work.bytes / row.us.median * 1e-3;
  row.in_place_us = quantile(in_place_us, 0.5);
  const double seconds = roofline.seconds(work.flops, work.bytes, computes_by_dots(plan));
  const double least = row.in_place_us > 0 ? row.in_place_us : seconds * 1e6;
  row.roofline_percent = 100.0 * least / row.us.median;
  return row;
}

}  // namespace tessera::cli
