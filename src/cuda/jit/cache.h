// SPDX-License-Identifier: Apache-2.0
// Finds the cubin of a kernel's source in the first place that has it: this process, the packs, the disk cache, or else
// the compiler.
#pragma once

#include <memory>
#include <string>

#include "cuda/jit/compile.h"

namespace tessera::cuda {

enum class Origin { process, embedded, pack, disk, compiler };
const char* to_string(Origin origin) noexcept;

struct Found {
  std::shared_ptr<const Compiled> compiled;
  Origin origin = Origin::process;
};

/// Thread-safe: if several threads want a source, one compiles it and the others wait. A compiled kernel is stored on
/// disk; if that fails, the failure is logged and the kernel is used nevertheless. Throws what compile() throws; a
/// later call tries again.
Found find_or_compile(const KernelSource& source, const std::string& architecture);

/// For measurements and tests. forget_compiled() drops the kernels that this process holds, so that the next look-up
/// goes to the packs, the disk or the compiler. After ignore_packs() packs are not looked into any more.
void forget_compiled();
void ignore_packs();

}  // namespace tessera::cuda
