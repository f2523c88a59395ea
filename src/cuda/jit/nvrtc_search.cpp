// SPDX-License-Identifier: Apache-2.0
// Searches the places where NVRTC may be. Only the file system is read, so that a cached kernel is found without
// opening a library of 100 MB.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "cuda/jit/nvrtc.h"
#include "cuda/jit/settings.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

std::string variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value != nullptr ? value : "";
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

/// Sub-folders of `folder` whose name starts with `prefix`, last name first (newer versions, mostly).
std::vector<fs::path> folders_in(const fs::path& folder, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->path().filename().string().starts_with(prefix) && at->is_directory(ignored)) found.push_back(at->path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

class Search {
 public:
  void sought(std::string place) {
    if (std::find(sought_.begin(), sought_.end(), place) == sought_.end()) sought_.push_back(std::move(place));
  }

  void folder(const fs::path& folder, const std::string& where) {
    if (folder.empty()) return;
    sought(folder.string());
    for (const char* name : kNames) {
      if (is_file(folder / name)) add(folder / name, where);
    }
  }

  /// A library, or a folder that holds one (also in lib or lib64).
  void named(const std::string& path, const std::string& where) {
    if (path.empty()) return;
    if (is_file(path)) {
      sought(path + " (" + where + ")");
      return add(path, where);
    }
    folder(path, where);
    for (const char* below : {"lib64", "lib"}) folder(fs::path(path) / below, where);
    packages(path);  // pip install --target
    prefix(path);    // a virtual environment
  }

  void folders_of(const std::string& list, const std::string& where) {
    for (std::size_t at = 0; at < list.size();) {
      const std::size_t end = std::min(list.find(':', at), list.size());
      if (end > at) folder(list.substr(at, end - at), where);
      at = end + 1;
    }
  }

  void toolkit(const fs::path& root) {
    if (root.empty()) return;
    folder(root / "lib64", "CUDA toolkit");
    folder(root / "targets/x86_64-linux/lib", "CUDA toolkit");
    folder(root / "targets/sbsa-linux/lib", "CUDA toolkit");
  }

  /// pip's NVIDIA packages: nvidia/cu13/lib (nvidia-cuda-nvrtc), nvidia/cuda_nvrtc/lib (nvidia-cuda-nvrtc-cu12).
  void packages(const fs::path& site) {
    std::error_code ignored;
    if (!fs::is_directory(site / "nvidia", ignored)) return sought((site / "nvidia").string());
    for (const fs::path& cuda : folders_in(site / "nvidia", "cu")) folder(cuda / "lib", "pip package");
  }

  /// site-packages of a Python whose prefix (the folder that holds bin and lib) this is.
  void prefix(const fs::path& root) {
    if (root.empty()) return;
    for (const char* library : {"lib", "lib64", "local/lib"}) {
      for (const fs::path& python : folders_in(root / library, "python3")) {
        packages(python / "site-packages");
        packages(python / "dist-packages");
      }
    }
  }

  [[nodiscard]] NvrtcFiles take(bool named) { return {std::move(files_), std::move(sought_), named}; }

 private:
  void add(const fs::path& path, const std::string& where) {
    const auto known = [&](const NvrtcFile& file) {
      std::error_code ignored;
      return fs::equivalent(file.path, path, ignored);
    };
    if (std::none_of(files_.begin(), files_.end(), known)) files_.push_back({path.string(), where});
  }

  std::vector<std::string> sought_;
  std::vector<NvrtcFile> files_;
};

void search_python(Search& search) {
  // If this library is in site-packages, the folder nvidia is beside it or some levels up.
  fs::path folder = fs::path(own_file()).parent_path();
  for (int up = 0; up < 4 && folder.has_relative_path(); ++up, folder = folder.parent_path()) {
    if (folder.filename() == "site-packages" || folder.filename() == "dist-packages") search.packages(folder);
    if (is_file(folder / "pyvenv.cfg")) search.prefix(folder);
  }
  search.prefix(variable("VIRTUAL_ENV"));
  search.prefix(variable("CONDA_PREFIX"));
  const std::string path = variable("PATH");
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t end = std::min(path.find(':', at), path.size());
    const fs::path bin = path.substr(at, end - at);
    if (end > at && is_file(bin / "python3")) search.prefix(bin.parent_path());
    at = end + 1;
  }
  if (const std::string home = variable("HOME"); !home.empty()) search.prefix(fs::path(home) / ".local");
}

}  // namespace

bool nvrtc_is_named() { return !nvrtc_setting().path.empty() || !variable("TESSERA_NVRTC").empty(); }

NvrtcFiles nvrtc_files() {
  Search search;
  if (const std::string set = nvrtc_setting().path; !set.empty()) {
    search.named(set, "the setting");
    return search.take(true);  // a wrong setting is an error: nothing else is tried
  }
  if (const std::string set = variable("TESSERA_NVRTC"); !set.empty()) {
    search.named(set, "TESSERA_NVRTC");
    return search.take(true);
  }
  search.sought("TESSERA_NVRTC (not set)");
  search.folders_of(variable("LD_LIBRARY_PATH"), "LD_LIBRARY_PATH");
  for (const char* folder : {"/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
                             "/usr/lib", "/lib64"}) {
    search.folder(folder, "system library folder");
  }
  search.toolkit(variable("CUDA_HOME"));
  search.toolkit(variable("CUDA_PATH"));
  search.toolkit("/usr/local/cuda");
  for (const fs::path& root : folders_in("/usr/local", "cuda-")) search.toolkit(root);
  search.toolkit("/opt/cuda");
  search_python(search);
  return search.take(false);
}

}  // namespace tessera::cuda
