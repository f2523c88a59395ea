// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/probe.h"
#include "cuda/jit/pack.h"
#include "device/kernel_timing.h"
#include "device/machine.h"
#include "device/machine_json.h"
#include "options/commands.h"
#include "tessera/cuda.h"
#include "tessera/version.h"

namespace tessera::cli {
namespace {

void print_gpus(const Machine& machine) {
  if (machine.gpus.empty()) {
    fmt::print("gpus:             none ({})\n", machine.gpu_note);
    return;
  }
  fmt::print("cuda driver:      {}.{}\n", machine.driver_version / 1000, machine.driver_version % 1000 / 10);
  for (const cuda::Device& gpu : machine.gpus) {
    fmt::print("gpu {}:            {}, sm_{}, {} multiprocessors, {:.1f} GiB, {} KiB shared memory a block\n",
               gpu.index, gpu.name, gpu.sm, gpu.multiprocessors, static_cast<double>(gpu.memory) / (1ULL << 30U),
               gpu.shared_memory / 1024);
  }
}

void print_compiler() {
  try {
    const cuda::Compiler compiler = cuda::compiler();
    fmt::print("nvrtc:            {}.{}, {}\n", compiler.major, compiler.minor, compiler.path);
  } catch (const Error& error) {
    fmt::print("nvrtc:            {}\n", error.got());
  }
  const std::string folder = cuda::cache_folder();
  fmt::print("kernel cache:     {}\n", folder.empty() ? "none" : folder);
  fmt::print("embedded kernels: {}\n", cuda::embedded_pack().size());
}

void print_machine(const Machine& machine) {
  fmt::print("cpu:              {}{}\n", machine.cpu,
             machine.identity.empty() ? "" : fmt::format(" ({})", machine.identity));
  fmt::print("cores:            {} usable of {} online\n", machine.cores_usable, machine.cores_online);
  fmt::print("memory:           {:.1f} GiB\n", static_cast<double>(machine.memory_bytes) / (1ULL << 30U));
  fmt::print("caches:           {}\n",
             machine.caches.empty() ? "unknown" : fmt::format("{}", fmt::join(machine.caches, ", ")));
  fmt::print("instruction sets: {} (usable here, best first; --isa forces one)\n", fmt::join(machine.isas, " "));
  print_gpus(machine);
  print_compiler();
}

void print_roofline(const Roofline& roofline) {
  fmt::print("roofline:         {} threads: {:.1f} GFLOP/s fp32 FMA, {}, {:.1f} GB/s reading memory\n",
             roofline.threads, roofline.gflops,
             roofline.dot_gflops > 0 ? fmt::format("{:.1f} GFLOP/s bf16 dot products", roofline.dot_gflops)
                                     : "no bf16 dot products",
             roofline.gbytes_s);
}

}  // namespace

nlohmann::json to_json(const Machine& machine) {
  nlohmann::json gpus = nlohmann::json::array();
  for (const cuda::Device& gpu : machine.gpus) {
    gpus.push_back(
        {{"name", gpu.name}, {"sm", gpu.sm}, {"memory_bytes", gpu.memory}, {"multiprocessors", gpu.multiprocessors}});
  }
  return {{"cpu", machine.cpu},
          {"identity", machine.identity},
          {"cores", machine.cores_usable},
          {"memory_bytes", machine.memory_bytes},
          {"caches", machine.caches},
          {"isas", machine.isas},
          {"gpus", gpus}};
}

void add_info(CLI::App& app, int& exit_code) {
  CLI::App* verb = app.add_subcommand("info", "Show the machine, the instruction sets, the GPUs and the build");
  auto json = std::make_shared<bool>(false);
  verb->add_flag("--json", *json, "Print one JSON object instead of text");
  auto limits = std::make_shared<bool>(false);
  verb->add_flag("--roofline", *limits,
                 "Measure what the cores can do at most: multiply-adds, dot products, reading memory");
  auto timing = std::make_shared<bool>(false);
  verb->add_flag("--timing", *timing, "Time how a kernel is found: compiled, on disk, embedded; then runs of it");
  verb->callback([json, timing, limits, &exit_code] {
    if (*timing) {
      print_kernel_timing();
      exit_code = kOk;
      return;
    }
    const Machine machine = describe_machine();
    Roofline roofline;
    if (*limits) roofline = measure_roofline(machine.cores_usable, machine.isas.front());
    if (*json) {
      nlohmann::json object = to_json(machine);
      object["version"] = version();
      object["build"] = build_info();
      if (*limits) {
        object["roofline"] = {{"threads", roofline.threads},
                              {"gflops", roofline.gflops},
                              {"dot_gflops", roofline.dot_gflops},
                              {"gbytes_s", roofline.gbytes_s}};
      }
      fmt::print("{}\n", object.dump(2));
    } else {
      print_machine(machine);
      if (*limits) print_roofline(roofline);
      std::string build = build_info();
      if (!build.empty() && build.back() != '\n') build += '\n';
      fmt::print("\n{}", build);
    }
    exit_code = kOk;
  });
}

}  // namespace tessera::cli
