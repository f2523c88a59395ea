// SPDX-License-Identifier: Apache-2.0
// What `tessera bench` prints: the head, a line for each row, and what all rows together say.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "bench/probe.h"
#include "bench/results.h"

namespace tessera::cli {

/// Which columns rows have beside those that all have.
struct Columns {
  bool on_gpu = false;
  bool accuracy = false;           // relative L2 errors, ours and the peers'
  std::vector<std::string> peers;  // their times and ratios
};

void print_head(const Roofline& roofline, const Columns& columns);
void print_row(const BenchRow& row, const Columns& columns);
/// The geometric mean of each peer's times over ours, by pass.
void print_geometric_means(const std::vector<BenchRow>& rows, const Columns& columns);
/// The fastest row of each problem beside the plan's own choice.
void print_winners(const std::vector<BenchRow>& rows);
/// The number of rows that got slower by more than `allowed`, a share of the time before; nullopt: none counts.
/// `path`: the earlier results; `rows`: how many were measured now.
int print_comparison(const std::string& path, const std::vector<Comparison>& both, std::size_t rows,
                     std::optional<double> allowed);

}  // namespace tessera::cli
