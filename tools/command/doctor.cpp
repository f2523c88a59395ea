// SPDX-License-Identifier: Apache-2.0
// `tessera doctor`: what is missing on this machine, and for each the one line that mends it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/jit/compile.h"
#include "cuda/jit/disk_cache.h"
#include "cuda/jit/pack.h"
#include "device/machine.h"
#include "options/commands.h"
#include "tessera/cuda.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kOldestDriver = 12000;
constexpr int kOldestGpu = 80;

enum class State { ok, note, missing };

struct Finding {
  State state = State::ok;
  std::string what;
  std::string found;
  std::string mend;  // one line to type or to do
};

std::string first_line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Whether a GPU of NVIDIA is plugged in, driver or not: on the PCI bus, on WSL's own device, or as the driver's node.
bool has_nvidia_gpu() {
  std::error_code error;
  for (fs::directory_iterator at("/sys/bus/pci/devices", error), end; !error && at != end; at.increment(error)) {
    const bool nvidia = first_line_of(at->path() / "vendor") == "0x10de";
    if (nvidia && first_line_of(at->path() / "class").starts_with("0x03")) return true;
  }
  return fs::exists("/dev/nvidia0", error) || fs::exists("/usr/lib/wsl/lib/libcuda.so.1", error);
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

class Doctor {
 public:
  /// `wants_gpu`: what only GPUs need is missing even where there is none.
  explicit Doctor(bool wants_gpu)
      : machine_(describe_machine()), wants_gpu_(wants_gpu || !machine_.gpus.empty() || has_nvidia_gpu()) {
    look_at_cpu();
    look_at_driver();
    look_at_gpus();
    look_at_compiler();
    look_at_cache();
    look_at_pack();
  }

  [[nodiscard]] bool print() const {
    constexpr const char* kWords[] = {"ok", "note", "MISSING"};
    int missing = 0;
    for (const Finding& each : findings_) {
      fmt::print("{:<8} {:<9} {}\n", kWords[static_cast<int>(each.state)], each.what, each.found);
      if (!each.mend.empty()) fmt::print("{:<18} mend: {}\n", "", each.mend);
      missing += each.state == State::missing ? 1 : 0;
    }
    if (missing == 0) {
      fmt::print("nothing is missing\n");
    } else {
      fmt::print("{} missing\n", missing);
    }
    return missing == 0;
  }

 private:
  void add(State state, std::string what, std::string found, std::string mend = "") {
    findings_.push_back({state, std::move(what), std::move(found), std::move(mend)});
  }
  /// As `what` counts only for those who want a GPU.
  [[nodiscard]] State of_gpus() const { return wants_gpu_ ? State::missing : State::note; }

  void look_at_cpu() {
    const auto has = [this](const char* isa) {
      return std::find(machine_.isas.begin(), machine_.isas.end(), isa) != machine_.isas.end();
    };
    const std::string found = fmt::format("{}: {}", machine_.cpu, fmt::join(machine_.isas, " "));
    if (has("avx2") || has("neon")) return add(State::ok, "cpu", found);
    add(State::missing, "cpu", found + "; want AVX2 (right without it, and several times slower)",
        "give the virtual machine the host's CPU (qemu: -cpu host), or take a CPU of 2015 or later");
  }

  void look_at_driver() {
    if (machine_.driver_version == 0) {
      if (!wants_gpu_) return add(State::note, "driver", "no GPU of NVIDIA here; nothing is needed for CPUs");
      return add(
          State::missing, "driver", machine_.gpu_note,
          "install NVIDIA's driver 525 or newer (Debian: apt install nvidia-driver; a container: docker run --gpus "
          "all)");
    }
    const std::string found = "for CUDA " + version_text(machine_.driver_version);
    if (machine_.driver_version >= kOldestDriver) return add(State::ok, "driver", found);
    add(State::missing, "driver", found + "; want one for CUDA 12 or newer", "update NVIDIA's driver to 525 or newer");
  }

  void look_at_gpus() {
    if (machine_.driver_version == 0) return;
    if (machine_.gpus.empty()) {
      return add(of_gpus(), "gpu", "the driver shows none: " + machine_.gpu_note,
                 "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all");
    }
    for (const cuda::Device& gpu : machine_.gpus) {
      const std::string found = fmt::format("cuda:{} {}, sm_{}", gpu.index, gpu.name, gpu.sm);
      if (gpu.sm >= kOldestGpu) {
        add(State::ok, "gpu", found);
      } else {
        add(State::missing, "gpu", found + "; want sm_80 (Ampere) or newer",
            "take another GPU: CUDA_VISIBLE_DEVICES=…, or compute on the CPU");
      }
    }
  }

  void look_at_compiler() {
    const int driver_major = machine_.driver_version / 1000;
    const std::string mend = driver_major == 12 ? "pip install nvidia-cuda-nvrtc-cu12" : "pip install 'tessera[cuda]'";
    try {
      const cuda::Compiler compiler = cuda::compiler();
      const std::string found = fmt::format("NVRTC {}.{}, {}", compiler.major, compiler.minor, compiler.path);
      if (driver_major == 0 || compiler.major <= driver_major) return add(State::ok, "compiler", found);
      add(State::missing, "compiler",
          fmt::format("{}; want one of CUDA {} or older, as the driver is", found, driver_major), mend);
    } catch (const Error&) {
      add(of_gpus(), "compiler", "no NVRTC 12.8 or newer: kernels that no pack holds cannot be compiled", mend);
    }
  }

  void look_at_cache() {
    const std::string folder = cuda::cache_folder();
    if (folder.empty()) {
      return add(of_gpus(), "cache", "no folder, as neither XDG_CACHE_HOME nor HOME is one: kernels are compiled anew",
                 "export XDG_CACHE_HOME=/var/tmp/$USER");
    }
    try {
      cuda::DiskCache(folder).check_writable();
      add(State::ok, "cache", folder);
    } catch (const Error& error) {
      add(of_gpus(), "cache", error.what(),
          fmt::format("export XDG_CACHE_HOME=/var/tmp/$USER, or chown and chmod go-w {}", folder));
    }
  }

  void look_at_pack() {
    const cuda::Pack& embedded = cuda::embedded_pack();
    const cuda::PackInUse& in_use = cuda::pack_in_use();
    if (!in_use.problem.empty()) {
      return add(State::missing, "pack", "passed over: " + in_use.problem,
                 "pip install --force-reinstall --no-deps tessera, or unset TESSERA_PACK");
    }
    std::set<std::string> architectures;
    for (const cuda::Pack* pack : {&embedded, &in_use.pack}) {
      for (const cuda::Pack::Listed& kernel : pack->listed()) architectures.insert(kernel.architecture);
    }
    if (architectures.empty()) {
      return add(State::note, "pack", "none: kernels are compiled when they are first needed, and kept",
                 wants_gpu_ ? "pip install tessera from a wheel that has one, or `tessera compile … --pack`" : "");
    }
    std::string without;
    for (const cuda::Device& gpu : machine_.gpus) {
      if (!architectures.contains(cuda::architecture(gpu.sm))) without = cuda::architecture(gpu.sm);
    }
    const std::string found =
        fmt::format("{} kernels for {}{}", embedded.size() + in_use.pack.size(), fmt::join(architectures, " "),
                    in_use.pack.path().empty() ? "" : ", " + in_use.pack.path());
    if (without.empty()) return add(State::ok, "pack", found);
    add(State::note, "pack", found + "; none for " + without + ", whose kernels are compiled when first needed");
  }

  Machine machine_;
  bool wants_gpu_;
  std::vector<Finding> findings_;
};

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  CLI::App* verb = app.add_subcommand("doctor", "Say what is missing on this machine, and what mends it");
  auto gpu = std::make_shared<bool>(false);
  verb->add_flag("--gpu", *gpu, "What GPUs need is missing even where no GPU is plugged in, as when an image is built");
  verb->footer("Exit code 1 when something is missing.");
  verb->callback([gpu, &exit_code] { exit_code = Doctor(*gpu).print() ? kOk : kCheckFailed; });
}

}  // namespace tessera::cli
