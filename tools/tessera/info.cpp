// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "machine.h"
#include "machine_json.h"
#include "tessera/version.h"

namespace tessera::cli {
namespace {

void print_gpus(const Machine& machine) {
  if (machine.gpus.empty()) {
    fmt::print("gpus:             none ({})\n", machine.gpu_note);
    return;
  }
  fmt::print("cuda driver:      {}.{}\n", machine.driver_version / 1000, machine.driver_version % 1000 / 10);
  for (const Gpu& gpu : machine.gpus) {
    fmt::print("gpu:              {}, sm_{}, {} multiprocessors, {:.1f} GiB, {} KiB shared memory a block\n", gpu.name,
               gpu.compute_capability, gpu.multiprocessors, static_cast<double>(gpu.memory_bytes) / (1ULL << 30U),
               gpu.shared_memory_opt_in / 1024);
  }
  fmt::print("                  (this version computes on the CPU only)\n");
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
}

}  // namespace

nlohmann::json to_json(const Machine& machine) {
  nlohmann::json gpus = nlohmann::json::array();
  for (const Gpu& gpu : machine.gpus) {
    gpus.push_back({{"name", gpu.name},
                    {"sm", gpu.compute_capability},
                    {"memory_bytes", gpu.memory_bytes},
                    {"multiprocessors", gpu.multiprocessors}});
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
  verb->callback([json, &exit_code] {
    const Machine machine = describe_machine();
    if (*json) {
      nlohmann::json object = to_json(machine);
      object["version"] = version();
      object["build"] = build_info();
      fmt::print("{}\n", object.dump(2));
    } else {
      print_machine(machine);
      std::string build = build_info();
      if (!build.empty() && build.back() != '\n') build += '\n';
      fmt::print("\n{}", build);
    }
    exit_code = kOk;
  });
}

}  // namespace tessera::cli
