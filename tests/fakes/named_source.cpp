// SPDX-License-Identifier: Apache-2.0
// A stand-in for NVRTC: "compiles" a source to bytes that name it, so that what surrounds the compiler
// is tested where there is none. A source with #error fails; one with #pragma spill uses local memory,
// one with #pragma serialize has products that wait for each other. Like the real one, 12.8 knows no family (sm_120f).
#include <atomic>

#include "fakes/nvrtc.h"

namespace {

std::atomic<int> compilations{0};
std::atomic<int> minor_version{9};

}  // namespace

extern "C" {

int fake_nvrtc_compilations() { return compilations; }

void fake_nvrtc_set_minor_version(int minor) { minor_version = minor; }

int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = minor_version;
  return 0;
}
int nvrtcCompileProgram(FakeProgram* program, int count, const char* const* options) {
  ++compilations;
  if (program->source.find("#error") != std::string::npos) {
    program->log = "kernel(1): error: #error directive";
    return 6;
  }
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (minor_version < 9 && option.starts_with("--gpu-architecture=") && option.ends_with('f')) {
      program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)";
      return 5;
    }
  }
  const bool spills = program->source.find("#pragma spill") != std::string::npos;
  program->log =
      "kernel(1): warning #1: a warning\nptxas info    : Function properties for tessera_kernel\n" +
      std::string(spills ? "ptxas         .     24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n"
                         : "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n") +
      "ptxas info    : Used 42 registers, 96 bytes smem, 400 bytes cmem[0]\n";
  if (program->source.find("#pragma serialize") != std::string::npos) {
    program->log += "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n";
  }
  program->cubin = "cubin of\n" + program->source;
  for (int i = 0; i < count; ++i) program->cubin += std::string(options[i]) + "\n";
  return 0;
}
}
