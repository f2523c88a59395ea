// SPDX-License-Identifier: Apache-2.0
// A compiled kernel loaded into a context, and its launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/jit/compile.h"
#include "tessera/executor.h"
#include "tessera/plan.h"

namespace tessera::cuda {

struct Dim3 {
  std::uint32_t x = 1;
  std::uint32_t y = 1;
  std::uint32_t z = 1;
  bool operator==(const Dim3&) const = default;
};

/// When a launched kernel's blocks may begin: behind the end of the kernel in front, or before it. The latter is for
/// kernels that wait as cuda/ptx/grid.cuh says, and means that only on SM90 and newer.
enum class Begins { behind, early };

class Kernel {
 public:
  /// `parameters[i]` points to the value of the kernel's parameter i. Neither allocates nor waits. Throws
  /// Error{internal} with the driver's words.
  void launch(Dim3 grid, Dim3 block, std::size_t shared_bytes, void* stream, void** parameters,
              Begins begins = Begins::behind) const;

  [[nodiscard]] int registers() const noexcept { return registers_; }      // a thread
  [[nodiscard]] int local_bytes() const noexcept { return local_bytes_; }  // a thread
  /// Blocks of so many threads and so much dynamic shared memory that a multiprocessor holds.
  [[nodiscard]] int blocks_per_multiprocessor(int threads, std::size_t shared_bytes) const;
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  /// Loads into the current context, which keeps the code until it is destroyed.
  Kernel(std::string name, const Compiled& compiled);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

 private:
  std::string name_;
  FunctionHandle function_ = nullptr;
  int registers_ = 0;
  int local_bytes_ = 0;
  bool can_begin_early_ = false;
};

/// The kernel in the calling thread's current context: loaded earlier (below 1 µs), or found or compiled (cache.h) and
/// loaded now. The reference lives as long as the process. `stream` is where it will be launched: under graph capture
/// only a loaded kernel can be had, anything else throws Error{invalid_argument} that says to warm up. An emulated
/// target's kernels are compiled for the device that is there.
const Kernel& kernel(const KernelSource& source, const Target& target, Stream stream = {});

/// The kernels of one plan, kept by its executor, so that a run neither builds their sources nor looks them up.
class KernelSet {
 public:
  /// Those of `sources`, in their order, in the calling thread's current context. The first time, and when the context
  /// is another than the last time, as kernel() has them; else without allocating, below 0.1 µs.
  std::span<const Kernel* const> load(std::span<const KernelSource> sources, const Target& target, Stream stream = {});

 private:
  std::optional<unsigned long long> context_;  // its id
  std::vector<const Kernel*> kernels_;
};

}  // namespace tessera::cuda
