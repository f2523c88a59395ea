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

/// When the blocks of a launched kernel may begin: after the end of the kernel ahead of it in the stream (`behind`), or
/// before (`early`, programmatic dependent launch). `early` is for kernels that wait as cuda/ptx/grid.cuh says. Before
/// SM90, and with drivers before 12.3, it is the same as `behind`.
enum class Begins { behind, early };

class Kernel {
 public:
  /// `parameters[i]` points to the value of the kernel's parameter i. Neither allocates nor waits. Throws
  /// Error{internal} with the driver's message.
  void launch(Dim3 grid, Dim3 block, std::size_t shared_bytes, void* stream, void** parameters,
              Begins begins = Begins::behind) const;

  [[nodiscard]] int registers() const noexcept { return registers_; }      // per thread
  [[nodiscard]] int local_bytes() const noexcept { return local_bytes_; }  // per thread
  /// How many blocks of `threads` threads and `shared_bytes` bytes of dynamic shared memory fit on a multiprocessor.
  [[nodiscard]] int blocks_per_multiprocessor(int threads, std::size_t shared_bytes) const;
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  /// Loads the code into the current context, which keeps it until the context is destroyed.
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

/// The kernel in the calling thread's current context. If it is loaded already, this takes less than 1 µs; else it is
/// found or compiled (cache.h), and loaded. The reference is valid as long as the process lives. `stream` is the stream
/// of the launch: if it is under graph capture and the kernel is not loaded, Error{invalid_argument} is thrown, which
/// asks for a warm-up. Kernels of an emulated target are compiled for the present device.
const Kernel& kernel(const KernelSource& source, const Target& target, Stream stream = {});

/// The kernels of one plan, kept by its executor, so that a run neither builds their sources nor looks them up.
class KernelSet {
 public:
  /// The kernels of `sources`, in their order, in the calling thread's current context. On the first call, and if the
  /// context differs from that of the last call, kernel() finds them. Otherwise this does not allocate, and takes less
  /// than 0.1 µs.
  std::span<const Kernel* const> load(std::span<const KernelSource> sources, const Target& target, Stream stream = {});

 private:
  std::optional<unsigned long long> context_;  // its id
  std::vector<const Kernel*> kernels_;
};

}  // namespace tessera::cuda
