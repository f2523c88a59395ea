// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most: the roofline that measurements are held against.
#pragma once

#include <string>

namespace tessera::cli {

struct Roofline {
  int threads = 0;
  double gflops = 0;    // fp32 fused multiply-adds in registers, on a GPU of bf16 operands; two operations each
  double gbytes_s = 0;  // reading memory that no cache holds; on a GPU copying it, bytes read and written
  // On a GPU: reading memory and writing it in place, as decode steps of linear attention do; bytes read and written.
  double in_place_gbytes_s = 0;
  std::string products;   // on a GPU: the instruction of the multiply-adds, wgmma or mma.sync
  double dot_gflops = 0;  // dot products of bf16 in registers, where the instruction set has them

  /// Least seconds for so many operations and bytes; `bf16`: of operands that dot products take.
  [[nodiscard]] double seconds(double flops, double bytes, bool bf16) const noexcept;
};

/// Measures for about a second with this many threads; dot products are those of `isa`.
Roofline measure_roofline(int threads, const std::string& isa);

}  // namespace tessera::cli
