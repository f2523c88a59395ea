// SPDX-License-Identifier: Apache-2.0
// Runs the `tessera` that was built beside this test.
#pragma once

#include <unistd.h>

#include <sys/wait.h>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace tessera::testing {

inline std::filesystem::path command_path() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tessera";
}

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

/// A folder of its own, removed at the end, in which commands run.
class Workplace {
 public:
  Workplace() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-command-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Workplace() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Workplace(const Workplace&) = delete;
  Workplace& operator=(const Workplace&) = delete;

  [[nodiscard]] std::string file(const std::string& name) const { return (folder_ / name).string(); }
  [[nodiscard]] bool has(const std::string& name) const { return std::filesystem::exists(folder_ / name); }
  [[nodiscard]] std::string text(const std::string& name) const {
    std::ifstream stream(folder_ / name);
    std::stringstream all;
    all << stream.rdbuf();
    return all.str();
  }
  void write(const std::string& name, const std::string& contents) const { std::ofstream(folder_ / name) << contents; }
  /// `arguments` as typed into a shell.
  [[nodiscard]] Outcome run(const std::string& arguments) const {
    return run_line("'" + command_path().string() + "' " + arguments);
  }
  [[nodiscard]] Outcome run_line(const std::string& command) const {
    const std::string line = "cd '" + folder_.string() + "' && " + command + " > stdout.txt 2> stderr.txt";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text("stdout.txt"), text("stderr.txt")};
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace tessera::testing
