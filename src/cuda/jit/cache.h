// SPDX-License-Identifier: Apache-2.0
// From a kernel's source to its cubin by the shortest way: this process, the packs, the disk, the
// compiler.
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

/// Safe from any thread: one compiles a source, others that want it wait. What the compiler makes is stored on disk; if
/// that fails it is logged and used all the same. Throws what compile() throws; a later call tries again.
Found find_or_compile(const KernelSource& source, const std::string& architecture);

/// For measurements and tests: forgets what this process holds, so that the next look-up goes further; and looks no
/// longer into packs.
void forget_compiled();
void ignore_packs();

}  // namespace tessera::cuda
