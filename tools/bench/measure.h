// SPDX-License-Identifier: Apache-2.0
// One row of a bench: a problem measured, with its peers interleaved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/peer.h"
#include "bench/probe.h"
#include "bench/suite.h"
#include "tessera/plan.h"

namespace tessera::cli {

/// A quantile of sorted or unsorted values; 0 of none. `part` in [0, 1], interpolated linearly.
double quantile(std::vector<double> values, double part);

struct Spread {
  double median = 0, p10 = 0, p90 = 0;
  static Spread of(const std::vector<double>& values);
};

struct PeerResult {
  Spread us;
  Spread ratio;                 // peer / ours, of pairs measured one after the other
  std::optional<double> error;  // as that of BenchRow
};

struct BenchRow {
  std::string problem;
  std::string pass;
  std::string wishes;
  std::string implementation;
  std::string isa;
  int threads = 0;
  int repetitions = 0;
  int calls = 0;  // in a repetition
  bool as_graph = false;
  Spread us;
  double gflop = 0, gbyte = 0;
  double tflops = 0, gbytes_s = 0, roofline_percent = 0;
  double in_place_us = 0;  // of a pass in place over as many bytes as the call's states have; 0 where there is none
  std::size_t workspace_bytes = 0;
  std::int64_t rss_growth_bytes = 0;  // peak during planning and the first run, over what held the tensors
  std::optional<double> error;        // of o: relative L2 distance from double precision, over sampled rows
  std::map<std::string, PeerResult> peers;
  std::map<std::string, std::string> refusals;  // peers that do not do this problem, and why
};

struct MeasureOptions {
  int warm_up = 1;
  int repetitions = 11;
  double batch_seconds = 0.02;  // a repetition repeats the call until it lasts this long
  Target target;
  Wishes wishes;
  bool accuracy = false;  // finds the error of o too, ours and the peers'
  bool as_graph = false;  // on a GPU: calls in a row as one CUDA graph, with caches as they are
};

/// Measures with what the machine can do at most as the scale. Throws what planning and running throw.
BenchRow measure(const BenchCase& bench_case, const MeasureOptions& options, const Roofline& roofline,
                 const std::vector<std::unique_ptr<Peer>>& peers);

}  // namespace tessera::cli
