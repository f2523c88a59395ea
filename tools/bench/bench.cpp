// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/device.h"
#include "bench/measure.h"
#include "bench/report.h"
#include "bench/results.h"
#include "bench/suite.h"
#include "bench/work.h"
#include "device/green_context.h"
#include "device/machine.h"
#include "device/machine_json.h"
#include "files/bytes.h"
#include "options/commands.h"
#include "options/device_options.h"
#include "options/number_option.h"
#include "options/progress.h"
#include "options/text_options.h"
#include "plan/implementations.h"
#include "tessera/error.h"
#include "tessera/version.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct BenchOptions {
  std::vector<std::string> suites;  // files, or problems in their text form
  std::string pass;
  std::vector<std::string> wishes;
  std::vector<std::string> peers;
  std::string peer_folder = "bench/peers";
  int warm_up = 1;
  int repetitions = 11;
  int multiprocessors = 0;  // of a GPU; 0: all
  std::string json, csv, compare_with;
  bool save = false, merge = false, sweep = false, graph = false, accuracy = false;
  std::string max_regression;
  TargetOptions target;
  PlaceOptions place;
  TextOptions texts;

  [[nodiscard]] bool on_gpu() const { return place.device != "cpu"; }
};

Target target_of(const BenchOptions& options) {
  const auto gpu = options.place.target();
  return gpu ? *gpu : options.target.target();
}

// With --multiprocessors, of which `target` is told.
std::unique_ptr<GreenContext> part_of_gpu(const BenchOptions& options, Target& target) {
  if (options.multiprocessors == 0) return nullptr;
  const auto refuse = [](const char* got, const char* want) {
    throw Error(ErrorCode::invalid_argument, "--multiprocessors", got, want);
  };
  if (!options.on_gpu()) refuse("--device cpu", "--device cuda beside it");
  auto part = std::make_unique<GreenContext>(target.index, options.multiprocessors);
  target.multiprocessors = part->multiprocessors();
  return part;
}

std::vector<BenchCase> read_cases(const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (const std::string& suite : options.suites) {
    std::error_code too_long;  // for a file name, which a problem may be
    const bool problem = suite.find(' ') != std::string::npos && !fs::exists(suite, too_long);
    for (BenchCase& each : problem ? parse_cases(suite, options.pass) : read_suite(suite, options.pass)) {
      cases.push_back(std::move(each));
    }
  }
  return cases;
}

// Every combination of "tile_q=64,128 splits=1,2"; one empty wish without any.
std::vector<Wishes> expand_wishes(const std::vector<std::string>& texts) {
  std::istringstream words(fmt::format("{}", fmt::join(texts, " ")));
  std::string braced;
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals != std::string::npos && word.find(',') != std::string::npos && word.find('{') == std::string::npos) {
      word = word.substr(0, equals + 1) + "{" + word.substr(equals + 1) + "}";
    }
    braced += (braced.empty() ? "" : " ") + word;
  }
  std::vector<Wishes> all;
  for (const std::string& each : expand_braces(braced)) all.push_back(Wishes::parse(each));
  return all;
}

// What a sweep tries when nothing is wished for. Which of them are possible differs from problem to problem.
constexpr const char* kSweptOnGpu = "tile_q=64,128 tile_kv=32,48,64,96,128 stages=1,2 warps=4,8";
constexpr const char* kSweptOnCpu = "tile_q=32,64,128 tile_kv=64,128,256";

std::vector<Wishes> wishes_of(const BenchOptions& options) {
  if (!options.sweep) return expand_wishes(options.wishes);
  std::vector<Wishes> all{Wishes{}};  // the plan's own choice comes first
  const std::vector<std::string> swept{options.on_gpu() ? kSweptOnGpu : kSweptOnCpu};
  for (const Wishes& each : expand_wishes(options.wishes.empty() ? swept : options.wishes)) all.push_back(each);
  return all;
}

// "5%" or "0.05" as 0.05; nothing when not asked for.
double parse_regression(const std::string& text) {
  try {
    std::size_t used = 0;
    const double value = std::stod(text, &used);
    const bool percent = text.substr(used) == "%";
    if ((percent || used == text.size()) && value >= 0 && std::isfinite(value)) return percent ? value / 100 : value;
  } catch (const std::logic_error&) {  // not a number: refused below like any other text
  }
  throw Error(ErrorCode::parse, "--max-regression", "'" + text + "'", "5% or 0.05");
}

std::vector<std::unique_ptr<Peer>> start_peers(const BenchOptions& options) {
  std::vector<std::unique_ptr<Peer>> peers;
  for (const std::string& name : options.peers) {
    const std::string script = (fs::path(options.peer_folder) / (name + ".py")).string();
    if (!fs::exists(script)) throw Error(ErrorCode::io, "--peer", "no file " + script, "--peer-folder, where it lies");
    peers.push_back(std::make_unique<Peer>(name, script));
  }
  return peers;
}

nlohmann::json machine_json(const Roofline& roofline, const Target& target,
                            const std::vector<std::unique_ptr<Peer>>& peers) {
  nlohmann::json machine = to_json(describe_machine());
  if (target.device == DeviceType::cuda) {
    machine["target"] = target.to_string();
    machine["driver"] = cuda::driver_version();
    machine["nvrtc"] = fmt::format("{}.{}", cuda::compiler().major, cuda::compiler().minor);
  }
  const std::time_t now = std::time(nullptr);
  char date[32] = {};
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
  machine["date"] = date;
  machine["version"] = version();
  machine["roofline"] = {{"threads", roofline.threads},
                         {"gflops", std::round(roofline.gflops * 10) / 10},
                         {"gbytes_s", std::round(roofline.gbytes_s * 10) / 10}};
  if (roofline.in_place_gbytes_s > 0) {
    machine["roofline"]["in_place_gbytes_s"] = std::round(roofline.in_place_gbytes_s * 10) / 10;
  }
  if (!roofline.products.empty()) machine["roofline"]["products"] = roofline.products;
  if (roofline.dot_gflops > 0) machine["roofline"]["dot_gflops"] = std::round(roofline.dot_gflops * 10) / 10;
  for (const auto& peer : peers) machine["peers"][peer->name()] = peer->version();
  return machine;
}

std::string results_folder(const Machine& machine, const Target& target) {
  if (target.device == DeviceType::cpu) return folder_name(machine);
  return folder_name(machine.gpus.at(static_cast<std::size_t>(target.index)).name);
}

// --json, or with --save bench/results/<machine>/<suite>.json beside the suites.
std::string json_path(const BenchOptions& options, const Target& target) {
  if (!options.save) return options.json;
  std::error_code too_long;
  if (options.suites.size() != 1 || !options.json.empty() || !fs::exists(options.suites.front(), too_long)) {
    throw Error(ErrorCode::invalid_argument, "--save", "several suites, a problem, or --json beside it",
                "the file of one suite, which names the results");
  }
  const fs::path suite(options.suites.front());
  const fs::path folder = suite.parent_path().parent_path() / "results" / results_folder(describe_machine(), target);
  fs::create_directories(folder);
  return (folder / suite.stem()).string() + ".json";
}

void write_results(const BenchOptions& options, const std::string& path, const nlohmann::json& machine,
                   const std::vector<BenchRow>& rows) {
  if (!path.empty()) {
    const bool merge = options.merge && fs::exists(path);
    const nlohmann::ordered_json earlier = merge ? read_results(path) : nlohmann::ordered_json();
    files::write_atomically(path, results(machine, rows, earlier).dump(1) + "\n");
  }
  if (!options.csv.empty()) files::write_atomically(options.csv, to_csv(rows));
}

// The plan of the first problem tells what 0 threads and no instruction set stand for.
Roofline host_roofline(const std::vector<BenchCase>& cases, const Target& target) {
  const Target resolved = make_plan(cases.front().problem, target).state().target;
  return measure_roofline(resolved.threads, resolved.isa);
}

int bench(const BenchOptions& options) {
  if (!options.max_regression.empty()) parse_regression(options.max_regression);
  const nlohmann::ordered_json before =
      options.compare_with.empty() ? nlohmann::ordered_json() : read_results(options.compare_with);
  options.texts.register_all();
  const std::vector<BenchCase> cases = read_cases(options);
  const std::vector<Wishes> wishes = wishes_of(options);
  if (options.graph && !options.on_gpu()) {
    throw Error(ErrorCode::invalid_argument, "--graph", "--device " + options.place.device, "--device cuda beside it");
  }
  MeasureOptions how{options.warm_up,  options.repetitions, 0.02, target_of(options), {},
                     options.accuracy, options.graph};
  const auto part = part_of_gpu(options, how.target);
  const std::string path = json_path(options, how.target);
  // Before the peers: while they start the machine is not alone.
  const Roofline roofline = options.on_gpu() ? measure_device_roofline(how.target) : host_roofline(cases, how.target);
  const auto peers = start_peers(options);
  const Columns columns{options.on_gpu(), options.accuracy, options.peers};
  print_head(roofline, columns);

  double total = 0, done = 0;  // GFLOP and GB, a guess at the time of a row
  const auto weight = [&](const BenchCase& each) {
    const Work work = work_of(each, {});
    return roofline.seconds(work.flops, work.bytes, false) * each.density + 0.1;
  };
  for (const BenchCase& each : cases) total += weight(each) * static_cast<double>(wishes.size());
  Progress progress(0);
  std::vector<BenchRow> rows;
  for (const BenchCase& each : cases) {
    for (const Wishes& wish : wishes) {
      progress.update_fraction(done / total, each.text());
      how.wishes = wish;
      done += weight(each);
      try {
        rows.push_back(measure(each, how, roofline, peers));
      } catch (const Error& error) {
        if (error.code() != ErrorCode::unsupported) throw;
        if (options.sweep) continue;  // most combinations of a sweep are impossible
        progress.clear();
        fmt::print("# skipped: {}\n", error.what());
        continue;
      }
      progress.clear();
      print_row(rows.back(), columns);
      // After every row, so that a run that is cut short keeps what it has.
      write_results(options, path, machine_json(roofline, how.target, peers), rows);
    }
  }
  if (rows.empty()) return kUnsupported;
  print_geometric_means(rows, columns);
  if (options.sweep) print_winners(rows);
  if (!path.empty()) fmt::print("# written {}\n", path);
  if (options.compare_with.empty()) return kOk;
  const auto allowed =
      options.max_regression.empty() ? std::nullopt : std::optional(parse_regression(options.max_regression));
  const int slower = print_comparison(options.compare_with, compare(before, rows), rows.size(), allowed);
  return slower > 0 ? kCheckFailed : kOk;
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* verb =
      app.add_subcommand("bench", "Measure problems, beside peers, against a roofline and earlier results");
  auto options = std::make_shared<BenchOptions>();
  verb->add_option("suites", options->suites, "Files of problems (bench/suites), or quoted problems")->required();
  verb->add_option("--pass", options->pass, "For lines without pass=: forward, backward or both")
      ->check(CLI::IsMember({"forward", "backward", "both"}));
  verb->add_option("-w,--wish", options->wishes,
                   "Wishes for the plan; comma-separated values are an axis: tile_q=64,128");
  verb->add_flag("--sweep", options->sweep,
                 "Try all tiles, stages and warps, or the axes of --wish, beside the plan's own choice; print winners");
  verb->add_option("--peer", options->peers,
                   "Measure this peer interleaved with Tessera; repeatable: torch_cpu, openvino_cpu, onnxruntime_cpu, "
                   "torch_flash, torch_cudnn, "
                   "flash_attn_4, fla_chunk, fla_decode, cula_decode");
  verb->add_option("--peer-folder", options->peer_folder, "Where the peers' scripts lie")->capture_default_str();
  add_number(*verb, "--warm-up", options->warm_up, 1, 1000, "Untimed calls")
      ->default_str(fmt::to_string(options->warm_up));
  add_number(*verb, "-r,--repetitions", options->repetitions, 1, 100000,
             "Timed repetitions, each of calls for at least 20 ms")
      ->default_str(fmt::to_string(options->repetitions));
  verb->add_option("--json", options->json, "Write the results as JSON");
  verb->add_option("--csv", options->csv, "Write the results as CSV");
  verb->add_flag("--save", options->save,
                 "Write JSON to results/<machine>/<suite>.json beside the folder of the suite");
  verb->add_flag("--merge", options->merge, "Keep the rows of the JSON file that were not measured now");
  verb->add_option("--compare", options->compare_with, "Compare with this JSON file of an earlier run");
  verb->add_option("--max-regression", options->max_regression,
                   "With --compare: exit 1 when a row is slower by more, as 5%");
  add_target_options(*verb, options->target);
  add_text_options(*verb, options->texts);
  add_place_options(*verb, options->place);
  verb->add_flag("--accuracy", options->accuracy,
                 "Show the relative L2 error of o against double precision on sampled rows, ours and the peers'");
  verb->add_flag(
      "--graph", options->graph,
      "On a GPU: calls in a row as one CUDA graph, caches as they are, instead of single calls on cold caches");
  add_number(*verb, "--multiprocessors", options->multiprocessors, 1, 100000,
             "On a GPU: at least so many of its multiprocessors, without the others; peers have as many");
  verb->footer(R"(Examples:
  tessera bench bench/suites/cpu_dense.txt --pass both --peer torch_cpu --save
  tessera bench "attention sq={512,2048} hq=8 d=64 dtype={fp32,bf16} {causal,}" --wish tile_q=64,128
  tessera bench bench/suites/gpu_dense.txt --device cuda --peer torch_flash --peer torch_cudnn --save
  tessera bench bench/suites/gpu_sweep.txt --device cuda --sweep --save
  tessera bench bench/suites/cpu_lists.txt --json new.json --compare old.json --max-regression 5%)");
  verb->callback([options, &exit_code] { exit_code = bench(*options); });
}

}  // namespace tessera::cli
