// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/compile.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <memory>

#include "cuda/jit/nvrtc.h"
#include "cuda/jit/settings.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

// Functions without an execution space become device functions, because src/shared is plain C++ for the host.
// --minimal leaves out textures, surfaces and device-side launches, which saves 30 ms in each compilation.
constexpr const char* kOptions[] = {"--std=c++20", "--device-as-default-execution-space", "--minimal",
                                    "--ptxas-options=--verbose"};

struct DestroyProgram {
  const Nvrtc* nvrtc;
  void operator()(Nvrtc::Program program) const noexcept { nvrtc->destroy_program(&program); }
};

void require(const Nvrtc& nvrtc, Nvrtc::Result result, const char* what) {
  if (result == kNvrtcSuccess) return;
  throw Error(ErrorCode::internal, what, nvrtc.error_string(result), "success");
}

std::string log_of(const Nvrtc& nvrtc, Nvrtc::Program program) {
  std::size_t bytes = 0;
  if (nvrtc.log_size(program, &bytes) != kNvrtcSuccess || bytes < 2) return "";
  std::string log(bytes, '\0');
  if (nvrtc.log(program, log.data()) != kNvrtcSuccess) return "";
  log.resize(log.find('\0') == std::string::npos ? log.size() : log.find('\0'));
  return log;
}

std::string version_of(const Compiler& compiler) {
  return std::to_string(compiler.major) + "." + std::to_string(compiler.minor);
}

std::string in_milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.0f ms", seconds * 1e3);
  return text;
}

/// The number before `words`, or 0 if they do not occur in the line.
int number_before(std::string_view line, std::string_view words) {
  const std::size_t at = line.find(words);
  if (at == std::string_view::npos || at == 0) return 0;
  std::size_t begin = at;
  while (begin > 0 && line[begin - 1] == ' ') --begin;
  const std::size_t end = begin;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

template <class Visit>
void for_each_line(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    visit(line);
  }
}

/// `words`: the compiler's message.
[[noreturn]] void refuse(const KernelSource& source, const std::string& architecture, const std::string& words) {
  for (const std::string& text : source.user_texts) {
    if (words.find(text) == std::string::npos) continue;
    throw Error(ErrorCode::invalid_argument, text, words, "C++ text that compiles for " + architecture);
  }
  throw Error(ErrorCode::internal, "kernel " + source.name + " for " + architecture, words, "source that it compiles");
}

/// The form of an architecture that this compiler knows. Family forms (sm_120f) came with NVRTC 12.9; older compilers
/// get the plain form. Code of either form runs on chips of the same major version and the same or a higher minor
/// version (sm_120 on 12.1). Of the instructions of our kernels only setmaxnreg needs the family form. Without it
/// kernels are correct but slow (ptx/warpgroup.cuh), and no plan chooses them there unless the caller wishes it
/// (loader=tma_warp). Cache keys have the architecture that was asked for. This is safe, because the compiler is a part
/// of an entry's path, and both forms run on the same chips.
std::string known_form(const std::string& architecture, const Compiler& compiler) {
  const bool knows_families = compiler.major > 12 || (compiler.major == 12 && compiler.minor >= 9);
  if (knows_families || !architecture.ends_with('f')) return architecture;
  return architecture.substr(0, architecture.size() - 1);
}

bool is_ptxas_account(std::string_view line) {
  if (loses_speed(line)) return false;
  return line.starts_with("ptxas info") || (line.starts_with("ptxas ") && line.find(" stack frame") != line.npos);
}

}  // namespace

std::string architecture(int sm) {
  const std::string number = std::to_string(sm);
  if (sm == 90) return "sm_90a";
  if (sm >= 100 && sm < 110) return "sm_100f";
  if (sm >= 120 && sm < 130) return "sm_120f";
  return "sm_" + number + (sm >= 110 ? "f" : "");
}

int compute_capability(std::string_view architecture) {
  int sm = 0;
  if (architecture.starts_with("sm_")) {
    const char* begin = architecture.data() + 3;
    const char* end = architecture.data() + architecture.size();
    const auto [rest, error] = std::from_chars(begin, end, sm);
    const std::string_view suffix(rest, static_cast<std::size_t>(end - rest));
    if (error == std::errc() && sm >= 80 && sm < 1000 && (suffix.empty() || suffix == "a" || suffix == "f")) return sm;
  }
  throw Error(ErrorCode::invalid_argument, "arch", architecture.empty() ? "nothing" : std::string(architecture),
              "sm_80 or newer, as in sm_80, sm_89, sm_90a, sm_100f, sm_120f");
}

std::span<const char* const> compile_options() noexcept { return kOptions; }

std::vector<std::string> warnings(const std::string& log) {
  std::vector<std::string> lines;
  for_each_line(log, [&](std::string_view line) {
    if (!line.empty() && !is_ptxas_account(line)) lines.emplace_back(line);
  });
  return lines;
}

bool loses_speed(std::string_view log) { return log.find("Potential Performance Loss") != log.npos; }

void read_resources(Compiled& compiled) {
  for_each_line(compiled.log, [&](std::string_view line) {
    if (!is_ptxas_account(line)) return;
    compiled.registers = std::max(compiled.registers, number_before(line, "registers"));
    compiled.shared_bytes = std::max(compiled.shared_bytes, number_before(line, "bytes smem"));
    compiled.local_bytes =
        std::max({compiled.local_bytes, number_before(line, "bytes stack frame"), number_before(line, "bytes lmem")});
    compiled.spill_bytes += number_before(line, "bytes spill stores") + number_before(line, "bytes spill loads");
  });
}

Compiled compile(const KernelSource& source, const std::string& architecture) {
  return compile(source, architecture, embedded_headers());
}

Compiled compile(const KernelSource& source, const std::string& architecture, std::span<const Header> headers) {
  compute_capability(architecture);  // throws if it is malformed
  const Nvrtc& nvrtc = cuda::nvrtc();
  std::vector<const char*> texts;
  std::vector<const char*> names;
  for (const Header& header : headers) {
    texts.push_back(header.text);
    names.push_back(header.name);
  }
  Compiled compiled;
  compiled.compiler = version_of(nvrtc.compiler);
  log("compiling " + source.name + " for " + architecture + " with NVRTC " + compiled.compiler);
  const auto begin = std::chrono::steady_clock::now();
  Nvrtc::Program raw = nullptr;
  require(nvrtc,
          nvrtc.create_program(&raw, source.text.c_str(), source.name.c_str(), static_cast<int>(headers.size()),
                               texts.data(), names.data()),
          "nvrtcCreateProgram");
  const std::unique_ptr<NvrtcProgram, DestroyProgram> program(raw, {&nvrtc});
  const std::string target = "--gpu-architecture=" + known_form(architecture, nvrtc.compiler);
  std::vector<const char*> options(std::begin(kOptions), std::end(kOptions));
  options.push_back(target.c_str());
  const Nvrtc::Result result = nvrtc.compile_program(raw, static_cast<int>(options.size()), options.data());
  compiled.log = log_of(nvrtc, raw);
  compiled.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (result != kNvrtcSuccess) {
    log("failed to compile " + source.name + " for " + architecture + " after " + in_milliseconds(compiled.seconds));
    refuse(source, architecture,
           std::string(nvrtc.error_string(result)) + " from NVRTC " + compiled.compiler + "\n" + compiled.log);
  }
  std::size_t bytes = 0;
  require(nvrtc, nvrtc.cubin_size(raw, &bytes), "nvrtcGetCUBINSize");
  compiled.cubin.resize(bytes);
  require(nvrtc, nvrtc.cubin(raw, compiled.cubin.data()), "nvrtcGetCUBIN");
  read_resources(compiled);
  log("compiled " + source.name + " for " + architecture + " in " + in_milliseconds(compiled.seconds) + ": " +
      std::to_string(compiled.registers) + " registers, " + std::to_string(compiled.spill_bytes) + " bytes of spills");
  return compiled;
}

}  // namespace tessera::cuda
