// SPDX-License-Identifier: Apache-2.0
#include "device/machine.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <string_view>

#include "tessera/error.h"
#include "tessera/plan.h"

namespace tessera::cli {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Value of the first "key : value" line of /proc/cpuinfo with this key.
std::string cpuinfo(std::string_view key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t end = line.find_last_not_of(" \t", colon == 0 ? 0 : colon - 1);
    if (end == std::string::npos || std::string_view(line).substr(0, end + 1) != key) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return {};
}

std::vector<std::string> read_caches() {
  std::vector<std::string> caches;
  for (int index = 0; index < 8; ++index) {
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", index);
    const std::string level = first_line(folder + "level");
    const std::string type = first_line(folder + "type");
    const std::string size = first_line(folder + "size");
    if (level.empty() || size.empty() || type == "Instruction") continue;
    const std::size_t digits = size.find_first_not_of("0123456789");  // "48K"
    if (digits == std::string::npos) continue;
    caches.push_back(
        fmt::format("L{}{} {} {}iB", level, type == "Data" ? "d" : "", size.substr(0, digits), size.substr(digits)));
  }
  return caches;
}

void read_gpus(Machine& machine) {
  try {
    machine.driver_version = cuda::driver_version();
    machine.gpus = cuda::devices();
    if (machine.gpus.empty()) machine.gpu_note = "the driver reports no device";
  } catch (const Error& error) {
    machine.gpu_note = error.got();
  }
}

}  // namespace

Machine describe_machine() {
  Machine machine;
  machine.cpu = cpuinfo("model name");
  if (machine.cpu.empty()) machine.cpu = "unknown CPU";
  if (const std::string family = cpuinfo("cpu family"); !family.empty()) {
    machine.identity = fmt::format("family {} model {} stepping {}", family, cpuinfo("model"), cpuinfo("stepping"));
  }
  machine.cores_online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  machine.cores_usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : machine.cores_online;
  machine.memory_bytes =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  machine.caches = read_caches();
  machine.isas = cpu_isas();
  read_gpus(machine);
  return machine;
}

std::string folder_name(const std::string& hardware) {
  std::string name;
  for (std::size_t at = 0; at < hardware.size(); ++at) {
    const auto letter = static_cast<unsigned char>(hardware[at]);
    if (letter == '(') {  // "(R)", "(TM)"
      const std::size_t close = hardware.find(')', at);
      if (close != std::string::npos) at = close;
      continue;
    }
    if (letter == '@') break;  // the nominal frequency
    if (std::isalnum(letter) != 0) {
      name += static_cast<char>(std::tolower(letter));
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  if (!name.empty() && name.back() == '-') name.pop_back();
  return name;
}

std::string folder_name(const Machine& machine) {
  std::string name = folder_name(machine.cpu);
  int family = 0;
  int model = 0;
  // Virtual machines often name a processor by its brand alone.
  const bool says_model = std::any_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  if (!says_model && std::sscanf(machine.identity.c_str(), "family %d model %d", &family, &model) == 2) {
    name += fmt::format("-f{}-m{}", family, model);
  }
  return name + (name.empty() ? "" : "-") + fmt::format("{}c", machine.cores_usable);
}

}  // namespace tessera::cli
