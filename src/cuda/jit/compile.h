// SPDX-License-Identifier: Apache-2.0
// A kernel's source text → cubin, by NVRTC, without a GPU.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/headers.h"
#include "plan/kernel_source.h"

namespace tessera::cuda {

/// The entry of its text is `extern "C" __global__ void tessera_kernel(...)`.
using detail::KernelSource;

inline constexpr const char* kKernelEntry = "tessera_kernel";

struct Compiled {
  std::vector<char> cubin;
  std::string log;       // of NVRTC and ptxas
  int registers = 0;     // a thread, the most of any function
  int spill_bytes = 0;   // stores and loads
  int local_bytes = 0;   // stack frame a thread
  int shared_bytes = 0;  // static
  std::string compiler;  // "13.5"
  double seconds = 0;    // that the compilation took
};

/// Architecture that code for compute capability `sm` is compiled for: 80 → "sm_80", 90 → "sm_90a", 103 → "sm_100f",
/// 121 → "sm_120f". The f (family) and a forms are what their instructions need; a compiler that does not know the f
/// forms yet (before 12.9) is asked for the plain ones.
std::string architecture(int sm);
/// The opposite, and checks the spelling. Throws Error{invalid_argument}.
int compute_capability(std::string_view architecture);

/// The options given to NVRTC besides the architecture; part of every cache key.
std::span<const char* const> compile_options() noexcept;

/// Throws Error{unsupported} without NVRTC or when it does not know the architecture, Error{internal} with the
/// compiler's log when the source does not compile, Error{invalid_argument} where that is about one of its user texts.
Compiled compile(const KernelSource& source, const std::string& architecture);
/// With other headers than the embedded ones.
Compiled compile(const KernelSource& source, const std::string& architecture, std::span<const Header> headers);

/// Reads registers, spills, stack and shared memory out of ptxas' words.
void read_resources(Compiled& compiled);
/// Whether ptxas tells, as information, of a loss of speed: products by wgmma that were to run side by side wait for
/// each other (C7510 and others), or a warpgroup does not get the registers that it asks for (C7504). Such a kernel is
/// right.
bool loses_speed(std::string_view log);
/// Lines of the log that are not ptxas' account of resources: warnings.
std::vector<std::string> warnings(const std::string& log);

}  // namespace tessera::cuda
