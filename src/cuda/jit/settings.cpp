// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/settings.h"

#include <cstdlib>
#include <mutex>
#include <optional>
#include <utility>

#include "tessera/cuda.h"

namespace tessera::cuda {
namespace {

struct Settings {
  std::mutex mutex;
  NvrtcSetting nvrtc;
  std::optional<std::string> cache_folder;
};
Settings& settings() {
  static Settings held;
  return held;
}

struct Log {
  std::mutex mutex;  // also keeps lines of several threads apart
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
