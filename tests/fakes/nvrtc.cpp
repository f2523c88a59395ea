// SPDX-License-Identifier: Apache-2.0
// NVRTC's entry points around a compiler that is another file's: named_source.cpp beside this one, and tests/emulator,
// which has the source compiled for the CPU.
#include "fakes/nvrtc.h"

#include <cstring>

namespace {

std::size_t with_end(const std::string& text) { return text.size() + 1; }

}  // namespace

extern "C" {

const char* nvrtcGetErrorString(int result) {
  return result == 0   ? "NVRTC_SUCCESS"
         : result == 5 ? "NVRTC_ERROR_INVALID_OPTION"
         : result == 6 ? "NVRTC_ERROR_COMPILATION"
                       : "NVRTC_ERROR";
}
int nvrtcCreateProgram(FakeProgram** out, const char* source, const char*, int headers, const char* const* texts,
                       const char* const* names) {
  *out = new FakeProgram{source, {}, "", ""};
  for (int i = 0; i < headers; ++i) (*out)->headers.emplace_back(names[i], texts[i]);
  return 0;
}
int nvrtcDestroyProgram(FakeProgram** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
int nvrtcGetProgramLogSize(FakeProgram* program, std::size_t* bytes) {
  *bytes = with_end(program->log);
  return 0;
}
int nvrtcGetProgramLog(FakeProgram* program, char* log) {
  std::memcpy(log, program->log.c_str(), with_end(program->log));
  return 0;
}
int nvrtcGetCUBINSize(FakeProgram* program, std::size_t* bytes) {
  *bytes = program->cubin.size();
  return 0;
}
int nvrtcGetCUBIN(FakeProgram* program, char* cubin) {
  std::memcpy(cubin, program->cubin.data(), program->cubin.size());
  return 0;
}
}
