// SPDX-License-Identifier: Apache-2.0
#include "bench/report.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>

namespace tessera::cli {
namespace {

std::string human_bytes(double bytes) {
  if (bytes >= 1 << 30) return fmt::format("{:.2f}G", bytes / (1 << 30));
  if (bytes >= 1 << 20) return fmt::format("{:.1f}M", bytes / (1 << 20));
  return fmt::format("{:.0f}K", bytes / 1024);
}

std::string human_time(double us) {
  if (us >= 1e6) return fmt::format("{:.3f} s ", us * 1e-6);
  if (us >= 1e3) return fmt::format("{:.2f} ms", us * 1e-3);
  return fmt::format("{:.1f} us", us);
}

}  // namespace

void print_head(const Roofline& roofline, const Columns& columns) {
  if (columns.on_gpu) {
    fmt::print("# roofline: {:.1f} TFLOP/s by {} of bf16, {:.1f} GB/s copying memory, {:.1f} in place\n",
               roofline.gflops * 1e-3, roofline.products, roofline.gbytes_s, roofline.in_place_gbytes_s);
  } else {
    fmt::print("# roofline, {} threads: {:.1f} GFLOP/s fp32 FMA, {}{:.1f} GB/s reading memory\n", roofline.threads,
               roofline.gflops,
               roofline.dot_gflops > 0 ? fmt::format("{:.1f} GFLOP/s bf16 dot products, ", roofline.dot_gflops) : "",
               roofline.gbytes_s);
  }
  fmt::print("{:>11} {:>7} {:>8} {:>8} {:>7} {:>8} {:>8}", "median", "+-", "TFLOP/s", "GB/s", "% roof", "wspace",
             "RSS+");
  for (const std::string& name : columns.peers) fmt::print(" {:>20}", name + " ratio");
  if (columns.accuracy) {
    fmt::print(" {:>9}", "error");
    for (const std::string& name : columns.peers) fmt::print(" {:>18}", name + " error");
  }
  fmt::print("  problem\n");
}

void print_row(const BenchRow& row, const Columns& columns) {
  const double half = row.us.median > 0 ? (row.us.p90 - row.us.p10) / 2 / row.us.median * 100 : 0;
  fmt::print("{:>11} {:>6.1f}% {:>8.4f} {:>8.2f} {:>6.1f}% {:>8} {:>8}", human_time(row.us.median), half, row.tflops,
             row.gbytes_s, row.roofline_percent, human_bytes(static_cast<double>(row.workspace_bytes)),
             human_bytes(static_cast<double>(row.rss_growth_bytes)));
  for (const std::string& name : columns.peers) {
    const auto found = row.peers.find(name);
    fmt::print(" {:>20}", found == row.peers.end() ? std::string("-")
                                                   : fmt::format("{} {:.3f}", human_time(found->second.us.median),
                                                                 found->second.ratio.median));
  }
  if (columns.accuracy) {
    const auto text = [](const std::optional<double>& error) { return error ? fmt::format("{:.2e}", *error) : "-"; };
    fmt::print(" {:>9}", text(row.error));
    for (const std::string& name : columns.peers) {
      const auto found = row.peers.find(name);
      fmt::print(" {:>18}", text(found == row.peers.end() ? std::nullopt : found->second.error));
    }
  }
  fmt::print("  {}{}\n", row.problem, row.wishes.empty() ? "" : " [" + row.wishes + "]");
  for (const auto& [name, reason] : row.refusals) fmt::print("#   {}: {}\n", name, reason);
  std::fflush(stdout);
}

void print_geometric_means(const std::vector<BenchRow>& rows, const Columns& columns) {
  for (const std::string& name : columns.peers) {
    for (const char* pass : {"forward", "backward"}) {
      double sum = 0, least = INFINITY;
      int count = 0;
      for (const BenchRow& row : rows) {
        const auto found = row.peers.find(name);
        if (row.pass != pass || found == row.peers.end()) continue;
        sum += std::log(found->second.ratio.median);
        least = std::min(least, found->second.ratio.median);
        ++count;
      }
      if (count > 0) {
        fmt::print("# {} {}: geometric mean of the ratios {:.3f}, least {:.3f}, {} rows\n", name, pass,
                   std::exp(sum / count), least, count);
      }
    }
  }
}

void print_winners(const std::vector<BenchRow>& rows) {
  fmt::print("# winners\n");
  for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    std::size_t best = begin;
    const BenchRow* own = nullptr;
    for (end = begin; end < rows.size() && rows[end].problem == rows[begin].problem; ++end) {
      if (rows[end].us.median < rows[best].us.median) best = end;
      if (rows[end].wishes.empty()) own = &rows[end];
    }
    fmt::print("{:>11} {:>8}  [{}]  {}\n", human_time(rows[best].us.median),
               own != nullptr ? fmt::format("{:.3f}", own->us.median / rows[best].us.median) : std::string("-"),
               rows[best].wishes.empty() ? "own choice" : rows[best].wishes, rows[best].problem);
  }
}

int print_comparison(const std::string& path, const std::vector<Comparison>& both, std::size_t rows,
                     std::optional<double> allowed) {
  int slower = 0;
  fmt::print("\n# against {}: {} of {} rows are in both\n", path, both.size(), rows);
  for (const Comparison& each : both) {
    const bool regression = allowed && each.after_us > each.before_us * (1 + *allowed);
    slower += regression ? 1 : 0;
    fmt::print("{:>11} -> {:>11} {:>+7.1f}%{}  {}\n", human_time(each.before_us), human_time(each.after_us),
               (each.after_us / each.before_us - 1) * 100, regression ? "  REGRESSION" : "", each.problem);
  }
  if (slower > 0) fmt::print("# {} rows are slower by more than {:.4g}%\n", slower, *allowed * 100);
  return slower;
}

}  // namespace tessera::cli
