// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/nvrtc.h"

#include <deque>
#include <mutex>
#include <optional>

#include "cuda/driver/driver.h"
#include "cuda/driver/library.h"
#include "cuda/jit/settings.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

constexpr int kOldestMajor = 12;  // 12.8 is the first with sm_120, --minimal and complete C++20
constexpr int kOldestMinor = 8;
constexpr const char* kLoaded[] = {"libnvrtc.so.13", "libnvrtc.so.12"};  // what others load into a process

/// Fills `out` and returns "", or returns why the library cannot be used.
std::string bind(const Library& library, Nvrtc& out) {
  if (!library) return library.error();
  const bool complete =
      library.find("nvrtcVersion", out.version) && library.find("nvrtcGetErrorString", out.error_string) &&
      library.find("nvrtcCreateProgram", out.create_program) &&
      library.find("nvrtcDestroyProgram", out.destroy_program) &&
      library.find("nvrtcCompileProgram", out.compile_program) &&
      library.find("nvrtcGetProgramLogSize", out.log_size) && library.find("nvrtcGetProgramLog", out.log) &&
      library.find("nvrtcGetCUBINSize", out.cubin_size) && library.find("nvrtcGetCUBIN", out.cubin);
  if (!complete) return "lacks an entry point of NVRTC";
  Compiler& compiler = out.compiler;
  if (out.version(&compiler.major, &compiler.minor) != kNvrtcSuccess) return "does not tell its version";
  compiler.path = library.path_of("nvrtcVersion");
  if (compiler.major < kOldestMajor || (compiler.major == kOldestMajor && compiler.minor < kOldestMinor)) {
    return "is NVRTC " + std::to_string(compiler.major) + "." + std::to_string(compiler.minor) + ", too old";
  }
  return "";
}

/// Candidates are opened in order. A driver loads cubins of compilers of its own major version and of older ones. So a
/// compiler of a newer major version is taken only if there is no other. Without a driver, as when a cache is filled,
/// the first one is taken.
class Choice {
 public:
  bool take(const Library& library, const std::string& name) {
    Nvrtc found;
    const std::string why = bind(library, found);
    if (!why.empty()) {
      refused_ += "; " + name + ": " + why;
      return false;
    }
    if (driver_major_ > 0 && found.compiler.major > driver_major_) {
      if (!newer_) newer_ = found;
      return false;
    }
    chosen_ = found;
    return true;
  }
  [[nodiscard]] const std::optional<Nvrtc>& result() const { return chosen_ ? chosen_ : newer_; }
  [[nodiscard]] const std::string& refused() const { return refused_; }

 private:
  int driver_major_ = driver_version_or_zero() / 1000;
  std::optional<Nvrtc> chosen_;
  std::optional<Nvrtc> newer_;
  std::string refused_;
};

Nvrtc open_nvrtc() {
  NvrtcFiles search = nvrtc_files();
  Choice choice;
  bool done = false;
  // A library that the process has already loaded (PyTorch, CuPy and JAX load one) costs nothing, so it comes first.
  // But a setting takes precedence.
  for (const char* name : kLoaded) {
    if (search.named || done) break;
    if (const Library loaded = Library::already_loaded(name)) done = choice.take(loaded, name);
  }
  for (const NvrtcFile& file : search.files) {
    if (!done) done = choice.take(Library(file.path), file.path);
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (search.named || done) break;
    search.sought.push_back(std::string(name) + " (system loader)");
    if (const Library library{name}) done = choice.take(library, name);
  }
  if (choice.result()) return *choice.result();
  std::string places;
  for (const std::string& place : search.sought) places += (places.empty() ? "" : ", ") + place;
  throw Error(
      ErrorCode::unsupported, "nvrtc", "none that can be used; sought in: " + places + choice.refused(),
      "libnvrtc 12.8 or newer: a CUDA toolkit, `pip install nvidia-cuda-nvrtc`, or TESSERA_NVRTC=/path/to/libnvrtc.so");
}

struct Opened {
  std::mutex mutex;
  std::deque<Nvrtc> all;  // the last is in use; none is closed, as threads may be compiling
  unsigned changes = 0;   // NvrtcSetting::changes when the last was opened
};
Opened& opened() {
  static Opened held;
  return held;
}

}  // namespace

const Nvrtc& nvrtc() {
  Opened& held = opened();
  const std::lock_guard lock(held.mutex);
  const unsigned now = nvrtc_setting().changes;
  if (held.all.empty() || held.changes != now) {
    held.all.push_back(open_nvrtc());
    held.changes = now;
  }
  return held.all.back();
}

const Nvrtc* opened_nvrtc() {
  Opened& held = opened();
  {
    const std::lock_guard lock(held.mutex);
    if (!held.all.empty() && held.changes == nvrtc_setting().changes) return &held.all.back();
  }
  if (nvrtc_is_named()) return nullptr;
  for (const char* name : kLoaded) {
    if (!Library::already_loaded(name)) continue;
    try {
      return &nvrtc();
    } catch (const Error&) {  // it is too old, and there is no other
      return nullptr;
    }
  }
  return nullptr;
}

Compiler compiler() { return nvrtc().compiler; }

}  // namespace tessera::cuda
