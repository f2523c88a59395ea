// SPDX-License-Identifier: Apache-2.0
// Files of measurements: JSON and CSV out, an earlier JSON in to compare with.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/measure.h"

namespace tessera::cli {

nlohmann::ordered_json to_json(const BenchRow& row);

/// {"machine": {…}, "rows": […]}. `earlier` rows stay where no new row has the same key (problem, pass, wishes,
/// threads, instruction set, graph).
nlohmann::ordered_json results(const nlohmann::json& machine, const std::vector<BenchRow>& rows,
                               const nlohmann::ordered_json& earlier = {});
/// Throws Error{io or parse} when it is not such a file.
nlohmann::ordered_json read_results(const std::string& path);

std::string to_csv(const std::vector<BenchRow>& rows);

struct Comparison {
  std::string problem;
  double before_us = 0, after_us = 0;
};
/// Rows that both hold.
std::vector<Comparison> compare(const nlohmann::ordered_json& before, const std::vector<BenchRow>& after);

}  // namespace tessera::cli
