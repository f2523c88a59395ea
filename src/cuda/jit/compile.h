// SPDX-License-Identifier: Apache-2.0
// Compiles the source text of a kernel to a cubin with NVRTC, without a GPU.
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

/// The entry point of its text is `extern "C" __global__ void tessera_kernel(...)`.
using detail::KernelSource;

inline constexpr const char* kKernelEntry = "tessera_kernel";

struct Compiled {
  std::vector<char> cubin;
  std::string log;       // of NVRTC and ptxas
  int registers = 0;     // per thread, the maximum over functions
  int spill_bytes = 0;   // stores and loads
  int local_bytes = 0;   // stack frame, per thread
  int shared_bytes = 0;  // static
  std::string compiler;  // "13.5"
  double seconds = 0;    // duration of the compilation
};

/// The architecture for which code for compute capability `sm` is compiled: 80 → "sm_80", 90 → "sm_90a", 103 →
/// "sm_100f", 121 → "sm_120f". Some instructions need the a or f (family) form. A compiler before 12.9, which does not
/// know f forms, gets the plain form.
std::string architecture(int sm);
/// The compute capability of an architecture. Throws Error{invalid_argument} if it is malformed.
int compute_capability(std::string_view architecture);

/// The options given to NVRTC besides the architecture; part of every cache key.
std::span<const char* const> compile_options() noexcept;

/// Throws Error{unsupported} without NVRTC, and Error{invalid_argument} if `architecture` is malformed. If the
/// compilation fails, also because NVRTC does not know the architecture, it throws Error{internal} with the compiler's
/// log, or Error{invalid_argument} if the log contains one of the source's user texts.
Compiled compile(const KernelSource& source, const std::string& architecture);
/// The same with other headers than the embedded ones.
Compiled compile(const KernelSource& source, const std::string& architecture, std::span<const Header> headers);

/// Reads registers, spills, stack and shared memory from ptxas' part of the log.
void read_resources(Compiled& compiled);
/// Whether ptxas reports a loss of performance: wgmma instructions are serialized (C7510 and others), or a warpgroup
/// does not get the registers that it requests (C7504). ptxas reports this as information, and the kernel is correct.
bool loses_speed(std::string_view log);
/// The warnings: lines of the log that are not ptxas' report of resources.
std::vector<std::string> warnings(const std::string& log);

}  // namespace tessera::cuda
