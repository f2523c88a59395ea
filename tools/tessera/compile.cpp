// SPDX-License-Identifier: Apache-2.0
// `tessera compile`: kernels for given architectures, without a GPU.
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "commands.h"
#include "cuda/jit/compile.h"
#include "tessera/cuda.h"

namespace tessera::cli {
namespace {

struct CompileOptions {
  std::vector<std::string> sources;
  std::vector<std::string> architectures;
  std::string headers;
  std::string nvrtc;
  std::string cubin;
};

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::io, path, "a file that cannot be opened", "a readable file");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void print_row(const std::string& name, const std::string& architecture, const cuda::Compiled& compiled) {
  fmt::print("{:<44} {:<9} {:>4} {:>7} {:>6} {:>8} {:>8} {:>7.2f}\n", name, architecture, compiled.registers,
             compiled.spill_bytes, compiled.local_bytes, compiled.shared_bytes, compiled.cubin.size(),
             compiled.seconds);
  for (const std::string& line : cuda::warnings(compiled.log)) fmt::print("    {}\n", line);
  std::fflush(stdout);
}

void compile(const CompileOptions& options, int& exit_code) {
  cuda::set_nvrtc(options.nvrtc);
  std::optional<cuda::HeaderFiles> files;
  if (!options.headers.empty()) files.emplace(options.headers);
  fmt::print("{:<44} {:<9} {:>4} {:>7} {:>6} {:>8} {:>8} {:>7}\n", "kernel", "arch", "regs", "spills", "local",
             "static", "cubin", "seconds");
  for (const std::string& path : options.sources) {
    const cuda::KernelSource source{path, read_text(path)};
    for (const std::string& architecture : options.architectures) {
      const cuda::Compiled compiled =
          files ? cuda::compile(source, architecture, files->headers) : cuda::compile(source, architecture);
      print_row(source.name, architecture, compiled);
      if (compiled.spill_bytes > 0 || compiled.local_bytes > 0) exit_code = kCheckFailed;
      if (!options.cubin.empty()) {
        std::ofstream(options.cubin, std::ios::binary)
            .write(compiled.cubin.data(), static_cast<std::streamsize>(compiled.cubin.size()));
      }
    }
  }
}

}  // namespace

void add_compile(CLI::App& app, int& exit_code) {
  CLI::App* verb = app.add_subcommand("compile", "Compile GPU kernels for given architectures; needs no GPU");
  auto options = std::make_shared<CompileOptions>();
  verb->add_option("--source", options->sources, "Kernel source file; may be repeated")->required();
  verb->add_option("--arch", options->architectures, "Architectures: sm_80,sm_89,sm_90a,sm_100f,sm_120f")
      ->delimiter(',')
      ->required();
  verb->add_option("--headers", options->headers, "Folder to read device headers from instead of the embedded ones");
  verb->add_option("--nvrtc", options->nvrtc, "libnvrtc, or the folder that holds it");
  verb->add_option("--cubin", options->cubin, "Write the (last) cubin here");
  verb->callback([options, &exit_code] { compile(*options, exit_code); });
}

}  // namespace tessera::cli
