// SPDX-License-Identifier: Apache-2.0
// Compiles kernels for the CPU, by g++: what NVRTC's entry points (tests/fakes/nvrtc.cpp) call. Headers are those that
// the library hands to NVRTC, but for src/cuda/ptx: there kernel/cuda/ptx stands in front. TESSERA_EMULATOR_FLAGS adds
// options of g++, TESSERA_EMULATOR_KEEP=FOLDER keeps sources and objects there.
#include <stdlib.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "fakes/nvrtc.h"
#include "kernel_image.h"

namespace fs = std::filesystem;

namespace {

// -Og: more takes longer to compile than it saves of runs. -ftrivial-auto-var-init: what a thread has not set is a
// large number, the same in each run. Types are punned in shared memory, which nvcc allows.
// -fsanitize: a GPU refuses vectors that are not aligned, and has no trap for the rest.
constexpr const char* kOptions =
    " -std=c++20 -Og -w -fPIC -shared -fvisibility=hidden -fno-gnu-unique -fno-extern-tls-init"
    " -fno-exceptions -fno-rtti -fno-asynchronous-unwind-tables -ffp-contract=off -fno-math-errno"
    " -fno-strict-aliasing -ftrivial-auto-var-init=pattern"
    " -fsanitize=alignment,bounds,integer-divide-by-zero,shift -fsanitize-undefined-trap-on-error";

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// A new folder, removed at the end unless it is to be kept.
class Folder {
 public:
  Folder() : kept_(variable("TESSERA_EMULATOR_KEEP")) {
    std::string path =
        ((kept_.empty() ? fs::temp_directory_path() : fs::path(kept_)) / "tessera-kernel-XXXXXX").string();
    if (!kept_.empty()) fs::create_directories(kept_);
    if (::mkdtemp(path.data()) != nullptr) path_ = path;
  }
  ~Folder() {
    std::error_code ignored;
    if (kept_.empty() && !path_.empty()) fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  std::string kept_;
  fs::path path_;
};

/// 900 from --gpu-architecture=sm_90a.
int architecture(int count, const char* const* options) {
  constexpr const char* kOption = "--gpu-architecture=sm_";
  for (int i = 0; i < count; ++i) {
    if (std::strncmp(options[i], kOption, std::strlen(kOption)) == 0) {
      return std::atoi(options[i] + std::strlen(kOption)) * 10;
    }
  }
  return 800;
}

// A word of a shell's command.
std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 99;  // no NVRTC's, so that nobody takes its kernels from a cache
  return 0;
}

int nvrtcCompileProgram(FakeProgram* program, int count, const char* const* options) {
  const Folder folder;
  if (folder.path().empty()) return program->log = "no temporary folder", 1;
  for (const auto& [name, text] : program->headers) write(folder.path() / "headers" / name, text);
  const fs::path source = folder.path() / "kernel.cpp";
  const fs::path object = folder.path() / "kernel.so";
  const fs::path log = folder.path() / "log.txt";
  write(source, program->source +
                    "\nextern \"C\" __attribute__((visibility(\"default\"))) void emulated_entry(void** parameters) {\n"
                    "  emulator::call(tessera_kernel, parameters);\n}\n");
  const std::string here = TESSERA_EMULATOR_SOURCES;
  const std::string command = quoted(TESSERA_EMULATOR_COMPILER) + kOptions +
                              " -D__CUDA_ARCH__=" + std::to_string(architecture(count, options)) + " -include " +
                              quoted(here + "/kernel/cuda.h") + " -I" + quoted(here + "/kernel") + " -I" +
                              quoted((folder.path() / "headers").string()) + " " + variable("TESSERA_EMULATOR_FLAGS") +
                              " " + quoted(source.string()) + " " + quoted(TESSERA_EMULATOR_DRIVER) + " -o " +
                              quoted(object.string()) + " >" + quoted(log.string()) + " 2>&1";
  const int status = std::system(command.c_str());
  program->log = read(log);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 6;
  const std::string bytes = read(object);
  emulator::KernelImage header;
  header.bytes = bytes.size();
  program->cubin.assign(reinterpret_cast<const char*>(&header), sizeof(header));
  program->cubin += bytes;
  return 0;
}
}
