// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "cuda/jit/headers.h"
#include "tessera/error.h"

namespace tessera::cuda {

HeaderFiles::HeaderFiles(const std::string& folder) {
  namespace fs = std::filesystem;
  for (const char* below : {"shared", "cuda"}) {
    std::error_code error;
    for (fs::recursive_directory_iterator at(fs::path(folder) / below, error), end; !error && at != end;
         at.increment(error)) {
      // Below cuda, files that end in .h are headers of the host's code.
      const fs::path extension = at->path().extension();
      if (extension != ".cuh" && (extension != ".h" || below != std::string_view("shared"))) continue;
      std::ostringstream text;
      text << std::ifstream(at->path()).rdbuf();
      texts_.emplace_back(fs::relative(at->path(), folder).generic_string(), text.str());
    }
  }
  if (texts_.empty()) {
    throw Error(ErrorCode::io, folder, "no headers in shared or cuda", "a src folder");
  }
  std::sort(texts_.begin(), texts_.end());
  for (const auto& [name, text] : texts_) headers.push_back({name.c_str(), text.c_str()});
}

}  // namespace tessera::cuda
