// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/settings.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <utility>

#include "tessera/cuda.h"
#include "tessera/version.h"

namespace tessera::cuda {
namespace {

struct Settings {
  std::mutex mutex;
  NvrtcSetting nvrtc;
  std::optional<std::string> cache_folder;
  std::optional<PackSetting> pack;
};
Settings& settings() {
  static Settings held;
  return held;
}

struct Log {
  std::mutex mutex;  // also separates the lines of several threads
  LogFunction function;
};
Log& log_setting() {
  static Log held;
  return held;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value != nullptr ? value : "";
}

std::string default_cache_folder() {
  if (const std::string cache = variable("XDG_CACHE_HOME"); cache.starts_with('/')) return cache + "/tessera";
  if (const std::string home = variable("HOME"); home.starts_with('/')) return home + "/.cache/tessera";
  return "";
}

}  // namespace

void log(std::string_view line) {
  Log& held = log_setting();
  const std::lock_guard lock(held.mutex);
  if (held.function) held.function(line);
}

void set_log(LogFunction log) {
  Log& held = log_setting();
  const std::lock_guard lock(held.mutex);
  held.function = std::move(log);
}

NvrtcSetting nvrtc_setting() {
  Settings& held = settings();
  const std::lock_guard lock(held.mutex);
  return held.nvrtc;
}

void set_nvrtc(std::string path) {
  Settings& held = settings();
  const std::lock_guard lock(held.mutex);
  held.nvrtc.path = std::move(path);
  ++held.nvrtc.changes;
}

PackSetting pack_setting() {
  Settings& held = settings();
  const std::lock_guard lock(held.mutex);
  if (!held.pack) held.pack = PackSetting{variable("TESSERA_PACK"), 0};
  return *held.pack;
}

void set_kernel_pack(std::string path) {
  Settings& held = settings();
  const std::lock_guard lock(held.mutex);
  const unsigned changes = held.pack ? held.pack->changes + 1 : 1;
  held.pack = PackSetting{path.empty() ? variable("TESSERA_PACK") : std::move(path), changes};
}

std::string own_file() {
  Dl_info info{};
  link_map* object = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&version), &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) ==
      0) {
    return "";
  }
  // For a program, dli_fname is the name by which it was called, which need not be a path of its file.
  const bool program = object == nullptr || object->l_name == nullptr || *object->l_name == '\0';
  std::error_code error;
  std::filesystem::path path(info.dli_fname);
  if (program) path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) path = std::filesystem::weakly_canonical(path, error);
  return error ? "" : path.string();
}

std::string cache_folder() {
  Settings& held = settings();
  const std::lock_guard lock(held.mutex);
  if (!held.cache_folder) held.cache_folder = default_cache_folder();
  return *held.cache_folder;
}

void set_cache_folder(std::string folder) {
  Settings& held = settings();
  const std::lock_guard lock(held.mutex);
  held.cache_folder = std::move(folder);
}

}  // namespace tessera::cuda
