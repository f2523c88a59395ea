// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/cache.h"

#include <atomic>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <optional>

#include "cuda/driver/driver.h"
#include "cuda/jit/disk_cache.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/jit/pack.h"
#include "cuda/jit/settings.h"
#include "tessera/cuda.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

using Shared = std::shared_ptr<const Compiled>;

struct Process {
  std::mutex mutex;
  std::map<Digest, std::shared_future<Shared>> kernels;
  std::atomic<bool> ignore_packs{false};
};
Process& process() {
  static Process held;
  return held;
}

int major_of(const std::string& version) { return std::atoi(version.c_str()); }

std::string version_of(const Compiler& compiler) {
  return std::to_string(compiler.major) + "." + std::to_string(compiler.minor);
}

/// The version of the compiler that would be used. If the cache remembers it, the compiler is not opened, which would
/// take tens of milliseconds. "" if there is no compiler: then entries of any compiler are accepted.
std::string find_expected_compiler(const DiskCache& disk) {
  const int driver_major = driver_version_or_zero() / 1000;
  for (const NvrtcFile& file : nvrtc_files().files) {
    const std::string version = disk.compiler_of(file.path);
    if (version.empty()) break;  // not seen yet: open it
    if (driver_major == 0 || major_of(version) <= driver_major) return version;
  }
  try {
    const Compiler found = compiler();
    disk.remember_compiler(found.path, version_of(found));
    return version_of(found);
  } catch (const Error&) {
    return "";
  }
}

/// The search makes a hundred file system calls, so its result is kept until the folder or the setting changes.
std::string expected_compiler(const DiskCache& disk, const std::string& folder) {
  if (const Nvrtc* opened = opened_nvrtc()) return version_of(opened->compiler);
  struct Known {
    std::string folder;
    unsigned changes;
    std::string compiler;
  };
  static std::mutex mutex;
  static std::optional<Known> known;
  const std::lock_guard lock(mutex);
  const unsigned changes = nvrtc_setting().changes;
  if (!known || known->folder != folder || known->changes != changes) {
    known = Known{folder, changes, find_expected_compiler(disk)};
  }
  return known->compiler;
}

/// A driver loads code of compilers of its own major version and of older ones.
bool driver_takes(const Compiled& compiled) {
  const int driver_major = driver_version_or_zero() / 1000;
  return driver_major == 0 || major_of(compiled.compiler) <= driver_major;
}

Found find_further(const Digest& key, const KernelSource& source, const std::string& architecture) {
  const auto share = [](Compiled compiled) { return std::make_shared<const Compiled>(std::move(compiled)); };
  // The embedded pack is as trustworthy as the code around it, but a file may be damaged.
  if (!process().ignore_packs) {
    if (auto found = embedded_pack().find(key, Checksum::skip)) return {share(std::move(*found)), Origin::embedded};
    if (auto found = pack_in_use().pack.find(key, Checksum::verify); found && driver_takes(*found)) {
      return {share(std::move(*found)), Origin::pack};
    }
  }
  const std::string folder = cache_folder();
  const DiskCache disk(folder);
  if (!folder.empty()) {
    if (auto found = disk.find(key, architecture, expected_compiler(disk, folder))) {
      return {share(std::move(*found)), Origin::disk};
    }
  }
  Shared compiled = share(compile(source, architecture));
  if (!folder.empty()) {
    try {
      disk.store(key, architecture, source.name, *compiled);
    } catch (const Error& error) {
      log(std::string("cannot keep a compiled kernel: ") + error.what());
    }
  }
  return {std::move(compiled), Origin::compiler};
}

}  // namespace

const char* to_string(Origin origin) noexcept {
  switch (origin) {
    case Origin::process:
      return "process";
    case Origin::embedded:
      return "embedded pack";
    case Origin::pack:
      return "pack";
    case Origin::disk:
      return "disk cache";
    case Origin::compiler:
      return "compiler";
  }
  return "?";
}

Found find_or_compile(const KernelSource& source, const std::string& architecture) {
  const Digest key = kernel_key(source, architecture);
  Process& held = process();
  std::promise<Shared> promise;
  std::shared_future<Shared> waiting;
  {
    const std::lock_guard lock(held.mutex);
    const auto [at, fresh] = held.kernels.try_emplace(key);
    if (fresh) {
      at->second = promise.get_future().share();
    } else {
      waiting = at->second;
    }
  }
  if (waiting.valid()) return {waiting.get(), Origin::process};
  try {
    Found found = find_further(key, source, architecture);
    promise.set_value(found.compiled);
    return found;
  } catch (...) {
    {
      const std::lock_guard lock(held.mutex);
      held.kernels.erase(key);
    }
    promise.set_exception(std::current_exception());
    throw;
  }
}

void forget_compiled() {
  Process& held = process();
  const std::lock_guard lock(held.mutex);
  held.kernels.clear();
}

void ignore_packs() { process().ignore_packs = true; }

}  // namespace tessera::cuda
