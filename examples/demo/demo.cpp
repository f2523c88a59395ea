// SPDX-License-Identifier: Apache-2.0
// Attention on the activations of a real transformer: dense, checked against the model's own output and against the
// double-precision reference; then only on the tiles that hold 99 % of the probability mass that the library measured.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "files/array.h"
#include "files/bytes.h"
#include "files/convert.h"
#include "files/safetensors.h"
#include "picture.h"
#include "tessera/error.h"
#include "tessera/executor.h"
#include "tessera/plan.h"
#include "tile_choice.h"

namespace {

using namespace tessera;
using files::Array;

constexpr int kLayers[] = {0, 2, 5};
constexpr double kMass = 0.99;         // part of each query block's probability mass that the kept tiles hold
constexpr int kCopies = 8;             // of the activations in the longer sequence
constexpr double kBf16Error = 0.01;    // relative L2; bf16 rounding alone makes about 0.002
constexpr double kSparseError = 0.05;  // relative L2 of leaving out 1 % of the mass, and by far

struct Layer {
  Array q, k, v;  // bf16 (1, tokens, heads, 64)
  Array o;        // the model's own output; empty for a made-up sequence
  [[nodiscard]] std::int64_t tokens() const { return q.shape()[1]; }
};

// (tokens, heads, dim) becomes (1, copies · tokens, heads, dim).
Array repeated(const Array& source, int copies) {
  Array whole(source.dtype(), {1, source.shape()[0] * copies, source.shape()[1], source.shape()[2]});
  for (int copy = 0; copy < copies; ++copy) {
    std::memcpy(whole.data() + static_cast<std::size_t>(copy) * source.size_bytes(), source.data(),
                source.size_bytes());
  }
  return whole;
}

Layer load(const files::SafetensorsFile& file, int number, int copies) {
  const auto tensor = [&](const char* name) {
    return repeated(file.load(fmt::format("layer{}.{}", number, name)), copies);
  };
  return {tensor("q"), tensor("k"), tensor("v"), copies == 1 ? tensor("o") : Array()};
}

// The model's attention as a problem: grouped heads, causal, scale 1/8 (the default for 64 dimensions).
Problem problem_of(const Layer& layer, const std::string& more) {
  return Problem::parse(fmt::format("attention sq={} hq={} hkv={} d={} dtype=bf16 causal block=64x64 {}",
                                    layer.tokens(), layer.q.shape()[2], layer.k.shape()[2], layer.q.shape()[3], more));
}

Bindings bind(const Layer& layer, const Array& o) {
  Bindings bindings;
  bindings[Slot::q] = layer.q.tensor();
  bindings[Slot::k] = layer.k.tensor();
  bindings[Slot::v] = layer.v.tensor();
  bindings[Slot::o] = o.tensor();
  return bindings;
}

double milliseconds(Executor& executor, const Bindings& bindings) {
  const auto start = std::chrono::steady_clock::now();
  executor.run(bindings);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Medians of runs that take turns, so that both meet the same machine; after one each to warm up.
std::pair<double, double> timed(Executor& first, const Bindings& first_bindings, Executor& second,
                                const Bindings& second_bindings) {
  constexpr std::size_t kLeast = 3, kMost = 41;
  constexpr double kEnough = 800;  // milliseconds
  first.run(first_bindings);
  second.run(second_bindings);
  std::vector<double> first_times, second_times;
  double spent = 0;
  while (first_times.size() < kLeast || (spent < kEnough && first_times.size() < kMost)) {
    first_times.push_back(milliseconds(first, first_bindings));
    second_times.push_back(milliseconds(second, second_bindings));
    spent += first_times.back() + second_times.back();
  }
  return {median(first_times), median(second_times)};
}

// ‖got − want‖ / ‖want‖
double relative_l2(const Array& got, const Array& want) {
  const std::vector<float> a = files::to_floats(got.tensor()), b = files::to_floats(want.tensor());
  double difference = 0, size = 0;
  for (std::size_t at = 0; at < a.size(); ++at) {
    difference += std::pow(static_cast<double>(a[at]) - b[at], 2);
    size += std::pow(static_cast<double>(b[at]), 2);
  }
  return std::sqrt(difference / size);
}

struct Row {
  double dense_ms = 0, listed_ms = 0;
  double to_model = -1, to_reference = -1;  // relative L2 of the dense result; -1: not compared
  double listed_to_dense = 0;
  demo::TileChoice choice;
  Array mass;
};

// How far the dense result is from the model's own output and from the double-precision reference.
void check(const Layer& layer, const Array& dense, Row& row) {
  row.to_model = relative_l2(dense, layer.o);
  const Array reference(DType::bf16, layer.q.shape());
  Wishes wishes;
  wishes.implementation = "cpu.reference";
  Executor(make_plan(problem_of(layer, ""), Target::cpu(), wishes)).run(bind(layer, reference));
  row.to_reference = relative_l2(dense, reference);
}

Row run(const Layer& layer) {
  Row row;
  // Dense, and the mass per tile, written by the library itself.
  const Array dense(DType::bf16, layer.q.shape());
  const Problem measuring = problem_of(layer, "mass=mean");
  row.mass = Array(DType::fp32, {1, measuring.heads_q, measuring.query_blocks(), measuring.key_blocks()});
  Bindings bindings = bind(layer, dense);
  bindings[Slot::tile_mass] = row.mass.tensor();
  Executor(make_plan(measuring)).run(bindings);
  row.choice = demo::choose_tiles(row.mass.tensor(), kMass);

  const Array listed(DType::bf16, layer.q.shape());
  Bindings listed_bindings = bind(layer, listed);
  listed_bindings[Slot::tile_counts] = row.choice.counts_tensor();
  listed_bindings[Slot::tile_indices] = row.choice.indices_tensor();
  bindings[Slot::tile_mass] = Tensor{};
  Executor dense_executor(make_plan(problem_of(layer, "")));
  Executor listed_executor(make_plan(problem_of(layer, "list=indices")));
  std::tie(row.dense_ms, row.listed_ms) = timed(dense_executor, bindings, listed_executor, listed_bindings);
  row.listed_to_dense = relative_l2(listed, dense);
  if (layer.o) check(layer, dense, row);
  return row;
}

bool report(int number, std::int64_t tokens, const Row& row) {
  const auto error = [](double value) { return value < 0 ? std::string("-") : fmt::format("{:.1e}", value); };
  const bool good = row.to_model < kBf16Error && row.to_reference < kBf16Error && row.listed_to_dense < kSparseError;
  fmt::print("{:>5} {:>7} {:>10} {:>10} {:>9.1f}% {:>9.2f} {:>10.2f} {:>8.2f}x {:>11.4f}  {}\n", number, tokens,
             error(row.to_model), error(row.to_reference), row.choice.kept_percent, row.dense_ms, row.listed_ms,
             row.dense_ms / row.listed_ms, row.listed_to_dense, good ? "ok" : "TOO FAR");
  std::fflush(stdout);
  return good;
}

void print_head() {
  fmt::print("{:>5} {:>7} {:>21} {:>10} {:>9} {:>10} {:>9} {:>11}\n", "", "", "relative L2 of dense", "tiles", "dense",
             "listed", "measured", "relative L2");
  fmt::print("{:>5} {:>7} {:>10} {:>10} {:>10} {:>9} {:>10} {:>9} {:>11}\n", "layer", "tokens", "to model", "to oracle",
             "kept", "ms", "ms", "speed-up", "to dense");
}

int demonstrate(const std::string& data, const std::string& picture) {
  const files::SafetensorsFile file(data);
  fmt::print(
      "Attention of a small GPT on 1024 bytes of Python source: 6 query heads on 2 key/value heads, 64 dimensions,\n"
      "bf16, causal. Tiles are 64 x 64; for every head and query block the fewest that hold {:.0f} % of its\n"
      "probability mass are kept. The {}-token rows repeat the same activations {} times: a longer sequence to\n"
      "time, not a text that the model has read.\n\n",
      kMass * 100, kCopies * 1024, kCopies);
  print_head();
  bool good = true;
  std::vector<demo::LayerPicture> pictures;
  for (const int copies : {1, kCopies}) {
    for (const int number : kLayers) {
      const Layer layer = load(file, number, copies);
      Row row = run(layer);
      good = report(number, layer.tokens(), row) && good;
      if (copies == 1) {
        pictures.push_back(
            {fmt::format("layer {}", number), std::move(row.choice), files::to_floats(row.mass.tensor())});
      }
    }
  }
  files::write_atomically(
      picture,
      demo::draw(pictures, "Which tiles attention needs",
                 fmt::format("A byte-level GPT reading 1024 bytes of Python; 64 × 64 tiles that together hold {:.0f} % "
                             "of each query block's probability mass",
                             kMass * 100)));
  fmt::print("\npicture: {}\n", picture);
  if (!good) fmt::print("a result is further from what it should be than rounding explains\n");
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "--help" || argc > 3) {
    fmt::print("usage: tessera_demo [PICTURE.svg [ACTIVATIONS.safetensors]]\n");
    return first == "--help" ? 0 : 2;
  }
  const std::string picture =
      argc > 1 ? first : (std::filesystem::is_directory("build") ? "build/demo.svg" : "demo.svg");
  const std::string data = argc > 2 ? argv[2] : TESSERA_SOURCE_DIR "/examples/data/gpt/activations.safetensors";
  try {
    return demonstrate(data, picture);
  } catch (const tessera::Error& error) {
    fmt::print(stderr, "tessera_demo: {}\n", error.what());
    return 1;
  }
}
