// SPDX-License-Identifier: Apache-2.0
#include "cuda/source/kernel_text.h"

namespace tessera::cuda {

std::string to_string(const KernelText& kernel) {
  std::string parameters;
  for (const std::string& parameter : kernel.parameters) {
    parameters += (parameters.empty() ? "const __grid_constant__ " : ", const __grid_constant__ ");
    parameters += parameter;
  }
  return "#include \"" + kernel.file + "\"\nusing namespace tessera::cuda;\n" + kernel.definitions +
         "extern \"C\" __global__ void __launch_bounds__(" + kernel.bounds + ") tessera_kernel(" + parameters +
         ") {\n" + (kernel.has_memory ? "  extern __shared__ __align__(1024) char memory[];\n" : "") + "  " +
         kernel.call + ";\n}\n";
}

}  // namespace tessera::cuda
