// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most: the roofline that measurements are held against.
#pragma once

namespace tessera::cli {

struct Roofline {
  int threads = 0;
  double gflops = 0;    // fp32 fused multiply-adds in registers, two operations each
  double gbytes_s = 0;  // reading memory that no cache holds; on a GPU copying it, bytes read and written
  // On a GPU: reading memory and writing it in place, as decode steps of linear attention do; bytes read and written.
  double in_place_gbytes_s = 0;

  /// Least seconds for so many operations and bytes.
  [[nodiscard]] double seconds(double flops, double bytes) const noexcept;
};

/// Measures for about a second with this many threads.
Roofline measure_roofline(int threads);

}  // namespace tessera::cli
