// SPDX-License-Identifier: Apache-2.0
#include "bench/results.h"

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <map>

#include "tessera/error.h"

namespace tessera::cli {

using nlohmann::ordered_json;

namespace {

// Six significant digits: what is beyond is noise.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const double unit = std::pow(10.0, std::floor(std::log10(std::fabs(value))) - 5);
  return unit >= 1 ? std::round(value / unit) * unit : std::round(value * std::round(1 / unit)) / std::round(1 / unit);
}

ordered_json spread(const Spread& values) { return {{"p10", rounded(values.p10)}, {"p90", rounded(values.p90)}}; }

std::string key_of(const ordered_json& row) {
  return fmt::format("{}|{}|{}|{}|{}|{}", row.value("problem", ""), row.value("pass", ""), row.value("wishes", ""),
                     row.value("threads", 0), row.value("isa", ""), row.value("graph", false));
}

std::string quoted(const std::string& text) { return "\"" + text + "\""; }  // no value here holds a quote

}  // namespace

ordered_json to_json(const BenchRow& row) {
  ordered_json object = {{"problem", row.problem},
                         {"pass", row.pass},
                         {"us", rounded(row.us.median)},
                         {"spread", spread(row.us)},
                         {"repetitions", row.repetitions},
                         {"calls", row.calls},
                         {"gflop", rounded(row.gflop)},
                         {"gbyte", rounded(row.gbyte)},
                         {"tflops", rounded(row.tflops)},
                         {"gbytes_s", rounded(row.gbytes_s)},
                         {"roofline_percent", rounded(row.roofline_percent)},
                         {"workspace_bytes", row.workspace_bytes},
                         {"rss_growth_bytes", row.rss_growth_bytes},
                         {"implementation", row.implementation},
                         {"isa", row.isa},
                         {"threads", row.threads},
                         {"wishes", row.wishes},
                         {"peers", ordered_json::object()},
                         {"ratios", ordered_json::object()},
                         {"ratio_spread", ordered_json::object()}};
  if (row.as_graph) object["graph"] = true;
  if (row.in_place_us > 0) object["in_place_us"] = rounded(row.in_place_us);
  if (row.error) object["error"] = rounded(*row.error);
  for (const auto& [name, peer] : row.peers) {
    if (peer.error) object["peer_errors"][name] = rounded(*peer.error);
    object["peers"][name] = rounded(peer.us.median);
    object["ratios"][name] = rounded(peer.ratio.median);
    object["ratio_spread"][name] = spread(peer.ratio);
  }
  return object;
}

ordered_json results(const nlohmann::json& machine, const std::vector<BenchRow>& rows, const ordered_json& earlier) {
  ordered_json all = ordered_json::array();
  std::map<std::string, ordered_json> fresh;
  for (const BenchRow& row : rows) {
    ordered_json object = to_json(row);
    fresh[key_of(object)] = object;
  }
  if (earlier.is_object()) {
    for (const ordered_json& row : earlier["rows"]) {
      const auto replacement = fresh.find(key_of(row));
      all.push_back(replacement == fresh.end() ? row : replacement->second);
      if (replacement != fresh.end()) fresh.erase(replacement);
    }
  }
  for (const BenchRow& row : rows) {
    const auto found = fresh.find(key_of(to_json(row)));
    if (found == fresh.end()) continue;
    all.push_back(found->second);
    fresh.erase(found);
  }
  return {{"machine", machine}, {"rows", all}};
}

ordered_json read_results(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::io, path, "a file that cannot be opened", "JSON written by tessera bench");
  ordered_json object = ordered_json::parse(file, nullptr, false);
  const bool good = object.is_object() && object.contains("rows") && object["rows"].is_array();
  if (!good) throw Error(ErrorCode::parse, path, "other contents", "JSON written by tessera bench");
  for (const ordered_json& row : object["rows"]) {
    if (!row.is_object() || !row.contains("problem") || !row["problem"].is_string() || !row.contains("us") ||
        !row["us"].is_number()) {
      throw Error(ErrorCode::parse, path, "a row without problem and us", "JSON written by tessera bench");
    }
  }
  return object;
}

std::string to_csv(const std::vector<BenchRow>& rows) {
  std::vector<std::string> names;
  for (const BenchRow& row : rows) {
    for (const auto& [name, peer] : row.peers) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  std::string text =
      "problem,pass,wishes,implementation,isa,threads,repetitions,us,p10,p90,tflops,gbytes_s,roofline_percent,"
      "workspace_bytes,rss_growth_bytes";
  for (const std::string& name : names) text += fmt::format(",{0}_us,{0}_ratio", name);
  text += "\n";
  for (const BenchRow& row : rows) {
    text += fmt::format("{},{},{},{},{},{},{},{:.3f},{:.3f},{:.3f},{:.5f},{:.3f},{:.2f},{},{}", quoted(row.problem),
                        row.pass, quoted(row.wishes), row.implementation, row.isa, row.threads, row.repetitions,
                        row.us.median, row.us.p10, row.us.p90, row.tflops, row.gbytes_s, row.roofline_percent,
                        row.workspace_bytes, row.rss_growth_bytes);
    for (const std::string& name : names) {
      const auto found = row.peers.find(name);
      text += found == row.peers.end()
                  ? ",,"
                  : fmt::format(",{:.3f},{:.4f}", found->second.us.median, found->second.ratio.median);
    }
    text += "\n";
  }
  return text;
}

std::vector<Comparison> compare(const ordered_json& before, const std::vector<BenchRow>& after) {
  std::map<std::string, double> earlier;
  for (const ordered_json& row : before["rows"]) earlier[key_of(row)] = row["us"].get<double>();
  std::vector<Comparison> both;
  for (const BenchRow& row : after) {
    const auto found = earlier.find(key_of(to_json(row)));
    if (found == earlier.end()) continue;
    both.push_back({row.problem + (row.wishes.empty() ? "" : " [" + row.wishes + "]"), found->second, row.us.median});
  }
  return both;
}

}  // namespace tessera::cli
