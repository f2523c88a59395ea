// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

/// Prints how long a first run waits for its kernel: compiled, from the disk cache, from the embedded pack, each in a
/// process of its own that has seen nothing yet; and, on a GPU, the host time of later runs. Without a GPU the kernel
/// is SM90's and is not loaded.
void print_kernel_timing();

}  // namespace tessera::cli
