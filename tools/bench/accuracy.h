// SPDX-License-Identifier: Apache-2.0
// How far the output of a measured forward is from double precision: textbook attention of some of its rows.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/suite.h"
#include "cases/inputs/slot_shapes.h"

namespace tessera::cli {

/// Rows of o, drawn at random, as double precision has them.
class SampledOutput {
 public:
  /// Forwards of one source whose scores need no more than scale, softcap and an interval of keys for each query.
  static bool takes(const BenchCase& bench_case);
  SampledOutput(const BenchCase& bench_case, const Arrays& arrays);

  /// Relative L2 distance of these rows in an `o` of the problem's shape. NaN where that holds one.
  [[nodiscard]] double error_of(const Tensor& o) const;

 private:
  struct Row {
    std::int64_t token, head;
    std::vector<double> o;
  };
  std::vector<Row> rows_;
};

}  // namespace tessera::cli
