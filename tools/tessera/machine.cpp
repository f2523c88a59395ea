// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <cctype>
#include <cstddef>
#include <fstream>
#include <string_view>

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

// The few entry points of the CUDA driver that this needs; types as in its ABI.
struct CudaDriver {
  using Result = int;
  using Device = int;
  Result (*init)(unsigned) = nullptr;
  Result (*driver_version)(int*) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*device_get)(Device*, int) = nullptr;
  Result (*device_name)(char*, int, Device) = nullptr;
  Result (*device_memory)(std::size_t*, Device) = nullptr;
  Result (*device_attribute)(int*, int, Device) = nullptr;
  bool complete = true;

  explicit CudaDriver(void* library) {
    load(library, "cuInit", init);
    load(library, "cuDriverGetVersion", driver_version);
    load(library, "cuDeviceGetCount", device_count);
    load(library, "cuDeviceGet", device_get);
    load(library, "cuDeviceGetName", device_name);
    load(library, "cuDeviceTotalMem_v2", device_memory);
    load(library, "cuDeviceGetAttribute", device_attribute);
  }

 private:
  template <class Function>
  void load(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    complete = complete && function != nullptr;
  }
};

Gpu read_gpu(const CudaDriver& driver, int index) {
  constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedOptIn = 97;  // CUdevice_attribute
  Gpu gpu;
  CudaDriver::Device device = 0;
  if (driver.device_get(&device, index) != 0) return gpu;
  char name[256] = {};
  if (driver.device_name(name, sizeof(name) - 1, device) == 0) gpu.name = name;
  std::size_t memory = 0;
  if (driver.device_memory(&memory, device) == 0) gpu.memory_bytes = memory;
  int major = 0, minor = 0;
  driver.device_attribute(&major, kMajor, device);
  driver.device_attribute(&minor, kMinor, device);
  driver.device_attribute(&gpu.multiprocessors, kMultiprocessors, device);
  driver.device_attribute(&gpu.shared_memory_opt_in, kSharedOptIn, device);
  gpu.compute_capability = major * 10 + minor;
  return gpu;
}

void read_gpus(Machine& machine) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    machine.gpu_note = "no libcuda.so.1";
    return;
  }
  const CudaDriver driver(library);
  int count = 0;
  if (!driver.complete) {
    machine.gpu_note = "libcuda.so.1 lacks an entry point";
  } else if (const int result = driver.init(0); result != 0) {
    machine.gpu_note = fmt::format("cuInit returned {}", result);
  } else if (driver.driver_version(&machine.driver_version) != 0 || driver.device_count(&count) != 0 || count == 0) {
    machine.gpu_note = "the driver reports no device";
  }
  for (int index = 0; index < count; ++index) machine.gpus.push_back(read_gpu(driver, index));
  dlclose(library);
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

std::string folder_name(const Machine& machine) {
  std::string name;
  for (std::size_t at = 0; at < machine.cpu.size(); ++at) {
    const auto letter = static_cast<unsigned char>(machine.cpu[at]);
    if (letter == '(') {  // "(R)", "(TM)"
      const std::size_t close = machine.cpu.find(')', at);
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
  if (!name.empty() && name.back() != '-') name += '-';
  return name + fmt::format("{}c", machine.cores_usable);
}

}  // namespace tessera::cli
