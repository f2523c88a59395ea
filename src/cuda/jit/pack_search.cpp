// SPDX-License-Identifier: Apache-2.0
// Finds the pack file in which this process looks up kernels.
#include <filesystem>
#include <memory>
#include <mutex>

#include "cuda/jit/pack.h"
#include "cuda/jit/settings.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

/// Places near this code. A wheel (tessera/_core.so, tessera/bin/tessera) has the pack in tessera. An installation
/// prefix (bin/tessera, lib[/x86_64-linux-gnu]/libtessera.so) has it in share/tessera.
std::vector<std::string> places() {
  const fs::path folder = fs::path(own_file()).parent_path();
  if (folder.empty()) return {};
  std::vector<fs::path> found{folder / kPackName};
  if (folder.filename() == "bin") found.push_back(folder.parent_path() / kPackName);
  found.push_back(folder.parent_path() / "share" / "tessera" / kPackName);
  found.push_back(folder.parent_path().parent_path() / "share" / "tessera" / kPackName);
  std::vector<std::string> all;
  for (const fs::path& path : found) all.push_back(path.string());
  return all;
}

void take(PackInUse& in_use, const std::string& path) {
  try {
    in_use.pack = Pack::open(path);
  } catch (const Error& error) {
    in_use.problem = error.what();
    log("passing over the pack of kernels " + in_use.problem);
  }
}

PackInUse search(const std::string& named) {
  PackInUse in_use;
  if (named == kNoPack) return in_use;
  if (!named.empty()) {
    take(in_use, named);
    return in_use;
  }
  for (std::string& place : places()) {
    std::error_code ignored;
    if (fs::exists(place, ignored)) {
      take(in_use, place);
      in_use.sought.clear();
      return in_use;
    }
    in_use.sought.push_back(std::move(place));
  }
  return in_use;
}

}  // namespace

const PackInUse& pack_in_use() {
  // Earlier packs are kept, because another thread may be reading them.
  struct Held {
    std::mutex mutex;
    std::vector<std::unique_ptr<const PackInUse>> all;
    unsigned changes = 0;
  };
  static Held held;
  const std::lock_guard lock(held.mutex);
  const PackSetting setting = pack_setting();
  if (held.all.empty() || held.changes != setting.changes) {
    held.all.push_back(std::make_unique<const PackInUse>(search(setting.path)));
    held.changes = setting.changes;
  }
  return *held.all.back();
}

std::string kernel_pack() { return pack_in_use().pack.path(); }

}  // namespace tessera::cuda
