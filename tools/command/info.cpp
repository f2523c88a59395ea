// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

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

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }

/// Kernels and bytes of each family (the first word of their names) and architecture.
void print_contents(const cuda::Pack& pack) {
  std::map<std::string, std::pair<int, std::uint64_t>> families, architectures;
  for (const cuda::Pack::Listed& kernel : pack.listed()) {
    for (auto* sums : {&families[kernel.name.substr(0, kernel.name.find(' '))], &architectures[kernel.architecture]}) {
      ++sums->first;
      sums->second += kernel.bytes;
    }
  }
  for (const auto* table : {&architectures, &families}) {
    for (const auto& [name, sums] : *table) {
      fmt::print("  {:<22} {:>5} kernels {:>7.1f} MB\n", name, sums.first, megabytes(sums.second));
    }
  }
}

void print_pack(const char* what, const cuda::Pack& pack, const std::string& path) {
  fmt::print("{:<17} {}{} kernels, {:.1f} MB, by Tessera {} and NVRTC {}{}\n", what, path, pack.size(),
             megabytes(pack.total_bytes()), pack.version(), pack.compiler(),
             pack.version() == version() ? "" : " (those that have changed since are compiled)");
  print_contents(pack);
}

void print_packs() {
  if (const cuda::Pack& pack = cuda::embedded_pack(); pack.size() > 0) print_pack("embedded kernels:", pack, "");
  const cuda::PackInUse& in_use = cuda::pack_in_use();
  if (!in_use.problem.empty()) {
    fmt::print("kernel pack:      passed over: {}\n", in_use.problem);
  } else if (in_use.pack.path().empty()) {
    fmt::print("kernel pack:      none{}\n",
               in_use.sought.empty() ? "" : fmt::format(" (sought: {})", fmt::join(in_use.sought, ", ")));
  } else {
    print_pack("kernel pack:", in_use.pack, in_use.pack.path() + ": ");
  }
}

nlohmann::json packs_json() {
  const cuda::PackInUse& in_use = cuda::pack_in_use();
  return {{"embedded_kernels", cuda::embedded_pack().size()},
          {"path", in_use.pack.path()},
          {"kernels", in_use.pack.size()},
          {"bytes", in_use.pack.total_bytes()},
          {"version", in_use.pack.version()},
          {"compiler", in_use.pack.compiler()},
          {"problem", in_use.problem}};
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
  print_packs();
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
  verb->add_flag("--timing", *timing, "Time how a kernel is found: compiled, on disk, in a pack; then runs of it");
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
      object["pack"] = packs_json();
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
