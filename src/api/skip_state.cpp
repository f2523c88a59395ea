// SPDX-License-Identifier: Apache-2.0
#include "tessera/skip_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "api/device_bytes.h"
#include "base/checked.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kMagic = "tessera skip state 1";
constexpr float kNothing = -std::numeric_limits<float>::infinity();

[[noreturn]] void refuse(std::string argument, std::string got, std::string want,
                         ErrorCode code = ErrorCode::invalid_argument) {
  throw Error(code, std::move(argument), std::move(got), std::move(want));
}

void check_problem(const Problem& problem) {
  problem.check();
  if (!problem.skip) refuse("problem", problem.to_string(), "one with skip=mass or skip=threshold");
}

void check_ramp(const Problem& problem, const SkipOptions::Ramp& ramp, const std::string& of) {
  const bool mass = problem.skip.kind == SkipRule::Kind::mass;
  for (const auto& [name, value] : {std::pair{".first", ramp.first}, {".last", ramp.last}}) {
    if (mass ? value > 0.0F && value < 4.0F : value >= -100.0F && value <= 0.0F) continue;
    refuse(of + name, std::to_string(value), mass ? "a mass above 0 and below 4" : "a power of two from -100 to 0",
           ErrorCode::out_of_range);
  }
}

void check_options(const Problem& problem, const SkipOptions& options) {
  constexpr std::int64_t kMostSteps = 1 << 20;
  if (options.steps < 1 || options.steps > kMostSteps) {
    refuse("steps", std::to_string(options.steps), "1 to " + std::to_string(kMostSteps), ErrorCode::out_of_range);
  }
  if (options.warm_up < 0 || options.warm_up > options.steps) {
    refuse("warm_up", std::to_string(options.warm_up), "0 to the " + std::to_string(options.steps) + " steps",
           ErrorCode::out_of_range);
  }
  check_ramp(problem, options.ramp, "ramp");
  for (const SkipOptions::Head& each : options.heads) {
    if (each.head < 0 || each.head >= problem.heads_q) {
      refuse("heads", std::to_string(each.head), "a query head below " + std::to_string(problem.heads_q),
             ErrorCode::out_of_range);
    }
    check_ramp(problem, each.ramp, "heads[" + std::to_string(each.head) + "]");
  }
  if (options.layer.find('\n') != std::string::npos) refuse("layer", "a line break in it", "a name of one line");
}

float threshold_at(const Problem& problem, const SkipOptions& options, const SkipOptions::Ramp& ramp,
                   std::int64_t step) {
  if (step < options.warm_up) return kNothing;
  const double way = options.steps > 1 ? static_cast<double>(step) / static_cast<double>(options.steps - 1) : 0.0;
  const bool mass = problem.skip.kind == SkipRule::Kind::mass;
  const double first = mass ? std::log2(static_cast<double>(ramp.first)) : static_cast<double>(ramp.first);
  const double last = mass ? std::log2(static_cast<double>(ramp.last)) : static_cast<double>(ramp.last);
  return static_cast<float>(first + (last - first) * way);
}

/// A problem with only those fields that determine a state's shape and rule. It is a line of a saved file, so other
/// fields may change between save() and load().
Problem shape_of(const Problem& problem) {
  Problem shape;
  shape.batch = problem.batch;
  shape.q_layout = problem.q_layout;
  shape.seqlen_q = problem.seqlen_q;
  shape.total_q = problem.total_q;
  shape.heads_q = shape.heads_kv = problem.heads_q;
  shape.kv.seqlen = problem.kv.seqlen;
  if (problem.kv2) shape.kv2.emplace().seqlen = problem.kv2->seqlen;
  shape.block_q = problem.block_q;
  shape.block_kv = problem.block_kv;
  shape.list = problem.list;
  shape.skip = problem.skip;
  return shape;
}

std::int64_t all_keys(const Problem& problem) { return problem.kv.seqlen + (problem.kv2 ? problem.kv2->seqlen : 0); }

/// Tokens of a key block.
TokenRange tokens_of(const Problem& problem, std::int64_t block) {
  const std::int64_t first = problem.key_blocks_first();
  const std::int64_t source = block < first ? 0 : problem.kv.seqlen;
  const std::int64_t end = block < first ? problem.kv.seqlen : all_keys(problem);
  const std::int64_t begin = source + (block < first ? block : block - first) * problem.block_kv;
  return {begin, std::min(begin + problem.block_kv, end)};
}

std::size_t words_of(const Problem& problem) {
  return static_cast<std::size_t>(detail::ceil_div(problem.key_blocks(), 32));
}

/// Offsets of the parts of a state in its memory: list, codes and LSE; on a GPU also thresholds, steps and ranges.
struct Places {
  std::size_t codes, lse, thresholds, steps, must_do, must_skip, end;

  Places(std::size_t bit_bytes, std::size_t code_bytes, std::size_t lse_bytes, std::size_t threshold_count,
         std::size_t step_count, std::size_t words) {
    const auto behind = [](std::size_t at, std::size_t bytes) { return (at + bytes + 255) / 256 * 256; };
    codes = behind(0, bit_bytes);
    lse = behind(codes, code_bytes);
    thresholds = behind(lse, lse_bytes);
    steps = behind(thresholds, threshold_count * sizeof(float));
    must_do = behind(steps, step_count * sizeof(std::int32_t));
    must_skip = behind(must_do, words * sizeof(std::uint32_t));
    end = behind(must_skip, words * sizeof(std::uint32_t));
  }
};

std::string text_of(const TokenRange& range) {
  return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")";
}

std::string megabytes(std::size_t bytes) {
  const std::size_t hundredths = (bytes + 5000) / 10000;
  const std::string rest = std::to_string(hundredths % 100);
  return std::to_string(hundredths / 100) + (rest.size() < 2 ? ".0" : ".") + rest + " MB";
}

}  // namespace

std::vector<float> skip_thresholds(const Problem& problem, const SkipOptions& options) {
  check_problem(problem);
  check_options(problem, options);
  std::vector<float> thresholds;
  thresholds.reserve(static_cast<std::size_t>(options.steps * problem.heads_q));
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const std::size_t row = thresholds.size();
    thresholds.resize(row + static_cast<std::size_t>(problem.heads_q),
                      threshold_at(problem, options, options.ramp, step));
    for (const SkipOptions::Head& each : options.heads) {
      thresholds[row + static_cast<std::size_t>(each.head)] = threshold_at(problem, options, each.ramp, step);
    }
  }
  return thresholds;
}

std::vector<std::uint32_t> skip_blocks(const Problem& problem, std::span<const TokenRange> ranges, const char* name) {
  check_problem(problem);
  const std::int64_t keys = all_keys(problem);
  std::vector<std::uint32_t> words(static_cast<std::size_t>(detail::ceil_div(problem.key_blocks(), 32)), 0);
  for (const TokenRange& range : ranges) {
    if (range.begin < 0 || range.begin > range.end || range.end > keys) {
      refuse(name, text_of(range), "a range within the " + std::to_string(keys) + " keys", ErrorCode::out_of_range);
    }
    bool any = false;
    for (std::int64_t block = 0; block < problem.key_blocks(); ++block) {
      const TokenRange tokens = tokens_of(problem, block);
      if (tokens.begin < range.begin || tokens.end > range.end) continue;
      words[static_cast<std::size_t>(block / 32)] |= 1U << (block % 32);
      any = true;
    }
    if (any || range.begin == range.end) continue;
    refuse(name, text_of(range), "a range that holds a whole tile of " + std::to_string(problem.block_kv) + " keys");
  }
  return words;
}

SkipState::SkipState(const Problem& problem, SkipOptions options, Device device)
    : problem_(problem),
      options_(std::move(options)),
      device_(device),
      thresholds_(skip_thresholds(problem_, options_)) {
  allocate();
}

SkipState::SkipState(SkipState&& other) noexcept = default;
SkipState& SkipState::operator=(SkipState&& other) noexcept = default;
SkipState::~SkipState() = default;

void SkipState::allocate() {
  const std::int64_t rows = problem_.batch * problem_.heads_q * problem_.query_blocks();
  const bool mass = problem_.skip.kind == SkipRule::Kind::mass;
  const std::int64_t tokens =
      problem_.q_layout == Layout::varlen ? problem_.total_q : problem_.batch * problem_.seqlen_q;
  const std::size_t words = words_of(problem_);
  bit_bytes_ = static_cast<std::size_t>(rows) * words * sizeof(std::uint32_t);
  code_bytes_ = mass ? static_cast<std::size_t>(rows * problem_.key_blocks()) : 0;
  lse_bytes_ = mass ? static_cast<std::size_t>(tokens * problem_.heads_q) * sizeof(float) : 0;
  steps_.resize(static_cast<std::size_t>(options_.steps));
  for (std::size_t step = 0; step < steps_.size(); ++step) steps_[step] = static_cast<std::int32_t>(step);
  must_do_.clear();
  must_skip_.clear();
  const Places at(bit_bytes_, code_bytes_, lse_bytes_, thresholds_.size(), steps_.size(), words);
  if (device_.type == DeviceType::cuda) {
    gpu_ = std::make_unique<detail::DeviceBytes>(device_, at.end);
    gpu_->put(at.thresholds, thresholds_.data(), thresholds_.size() * sizeof(float));
    gpu_->put(at.steps, steps_.data(), steps_.size() * sizeof(std::int32_t));
  } else {
    host_.resize(at.thresholds);
  }
  reset();
}

void SkipState::reset(Stream stream) {
  next_step_ = 0;
  if (gpu_) {
    // This sets all bits. Those beyond the last key block mean nothing, an LSE of NaN counts as unknown like −∞, and
    // 255 is the largest code.
    gpu_->fill(std::byte{0xFF}, parts().back().at + lse_bytes_, stream);
    return;
  }
  const std::vector<Part> all = parts();
  const std::size_t words = words_of(problem_);
  const std::int64_t in_last = problem_.key_blocks() % 32;
  auto* bits = reinterpret_cast<std::uint32_t*>(host_.data());
  for (std::size_t i = 0; i < bit_bytes_ / sizeof(std::uint32_t); ++i) {
    bits[i] = in_last != 0 && i % words == words - 1 ? (1U << in_last) - 1U : ~0U;
  }
  std::fill_n(host_.data() + all[1].at, code_bytes_, std::byte{255});
  std::fill_n(reinterpret_cast<float*>(host_.data() + all[2].at), lse_bytes_ / sizeof(float), kNothing);
}

void SkipState::reshape(const Problem& problem) {
  check_problem(problem);
  if (problem.skip != problem_.skip) refuse("skip", problem.to_string(), "the rule of " + problem_.to_string());
  SkipState anew(problem, options_, device_);
  *this = std::move(anew);
}

void SkipState::set_ranges(std::span<const TokenRange> must_do, std::span<const TokenRange> must_skip) {
  std::vector<std::uint32_t> done = skip_blocks(problem_, must_do, "must_do");
  std::vector<std::uint32_t> skipped = skip_blocks(problem_, must_skip, "must_skip");
  std::int64_t left = problem_.key_blocks();
  for (std::size_t w = 0; w < done.size(); ++w) {
    left -= std::popcount(skipped[w]);
    if ((done[w] & skipped[w]) == 0) continue;
    const std::int64_t block = static_cast<std::int64_t>(w) * 32 + std::countr_zero(done[w] & skipped[w]);
    refuse("must_skip", "tokens " + text_of(tokens_of(problem_, block)) + ", which must_do has too",
           "ranges apart from those");
  }
  if (left == 0 && problem_.key_blocks() > 0) refuse("must_skip", "every tile", "a tile that is left");
  if (gpu_) {
    const Places at(bit_bytes_, code_bytes_, lse_bytes_, thresholds_.size(), steps_.size(), done.size());
    gpu_->put(at.must_do, done.data(), done.size() * sizeof(std::uint32_t));
    gpu_->put(at.must_skip, skipped.data(), skipped.size() * sizeof(std::uint32_t));
  }
  must_do_ = std::move(done);
  must_skip_ = std::move(skipped);
}

void SkipState::bind(std::int64_t step, Bindings& bindings, Stream stream) {
  if (step < 0 || step >= options_.steps) {
    refuse("step", std::to_string(step), "0 to below the run's " + std::to_string(options_.steps) + " steps",
           ErrorCode::out_of_range);
  }
  if (step != 0 && step < next_step_) {
    refuse("step", std::to_string(step) + " after step " + std::to_string(next_step_ - 1),
           "a later one, or 0 to begin anew", ErrorCode::out_of_range);
  }
  if (step == 0) reset(stream);
  next_step_ = step + 1;
  const Problem& p = problem_;
  const auto words = static_cast<std::int64_t>(words_of(p));
  const Places at(bit_bytes_, code_bytes_, lse_bytes_, thresholds_.size(), steps_.size(), words_of(p));
  // Thresholds, steps and ranges lie in a GPU's memory, or on the CPU in vectors.
  const auto told = [&](std::size_t place, auto& vector, std::int64_t first) -> void* {
    using Value = std::remove_reference_t<decltype(vector[0])>;
    return gpu_ ? static_cast<void*>(gpu_->data() + place + static_cast<std::size_t>(first) * sizeof(Value))
                : static_cast<void*>(vector.data() + first);
  };
  const auto put = [&](Slot slot, void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    bindings[slot] = Tensor::contiguous(data, dtype, shape);
    bindings[slot].device = device_;
  };
  std::byte* memory = gpu_ ? gpu_->data() : host_.data();
  put(Slot::tile_bits, memory, DType::uint32, {p.batch, p.heads_q, p.query_blocks(), words});
  put(Slot::skip_threshold, told(at.thresholds, thresholds_, step * p.heads_q), DType::fp32, {p.heads_q});
  if (p.skip.kind == SkipRule::Kind::mass) {
    put(Slot::skip_memory, memory + at.codes, DType::uint8, {p.batch, p.heads_q, p.query_blocks(), p.key_blocks()});
    if (p.q_layout == Layout::varlen) {
      put(Slot::skip_lse, memory + at.lse, DType::fp32, {p.heads_q, p.total_q});
    } else {
      put(Slot::skip_lse, memory + at.lse, DType::fp32, {p.batch, p.heads_q, p.seqlen_q});
    }
  } else {
    put(Slot::skip_step, told(at.steps, steps_, step), DType::int32, {1});
  }
  bindings[Slot::must_do_bits] = bindings[Slot::must_skip_bits] = Tensor{};
  if (must_do_.empty()) return;
  put(Slot::must_do_bits, told(at.must_do, must_do_, 0), DType::uint32, {words});
  put(Slot::must_skip_bits, told(at.must_skip, must_skip_, 0), DType::uint32, {words});
}

/// The list's words, without bits beyond the last key block.
std::vector<std::uint32_t> SkipState::words() const {
  std::vector<std::uint32_t> bits(bit_bytes_ / sizeof(std::uint32_t));
  if (gpu_) {
    gpu_->get(0, bits.data(), bit_bytes_);
  } else if (bit_bytes_ > 0) {
    std::memcpy(bits.data(), host_.data(), bit_bytes_);
  }
  const std::size_t words = words_of(problem_);
  const std::int64_t in_last = problem_.key_blocks() % 32;
  for (std::size_t i = words - 1; in_last != 0 && i < bits.size(); i += words) bits[i] &= (1U << in_last) - 1U;
  return bits;
}

double SkipState::active() const {
  const std::size_t words_a_row = words_of(problem_);
  const std::int64_t tiles = problem_.batch * problem_.heads_q * problem_.query_blocks() * problem_.key_blocks();
  std::int64_t computed = 0;
  std::size_t i = 0;
  for (std::uint32_t word : words()) {
    if (!must_do_.empty()) word = (word | must_do_[i % words_a_row]) & ~must_skip_[i % words_a_row];
    computed += std::popcount(word);
    ++i;
  }
  return tiles > 0 ? static_cast<double>(computed) / static_cast<double>(tiles) : 0.0;
}

std::size_t SkipState::bytes() const noexcept { return bit_bytes_ + code_bytes_ + lse_bytes_; }

std::string SkipState::describe() const {
  std::string text = "skip state" + (options_.layer.empty() ? "" : " of " + options_.layer) + ": " +
                     megabytes(bit_bytes_) + " of list";
  if (code_bytes_ > 0) text += ", " + megabytes(code_bytes_) + " of masses, " + megabytes(lse_bytes_) + " of LSE";
  return text + ", " + megabytes(bytes()) + " in all; next step " + std::to_string(next_step_) + " of " +
         std::to_string(options_.steps) + "; " + problem_.to_string();
}

std::vector<SkipState::Part> SkipState::parts() const {
  const Places at(bit_bytes_, code_bytes_, lse_bytes_, 0, 0, 0);
  return {{0, bit_bytes_}, {at.codes, code_bytes_}, {at.lse, lse_bytes_}};
}

/// The lines before the arrays of a saved file, without the next step.
std::string SkipState::header() const {
  return std::string(kMagic) + "\n" + shape_of(problem_).to_string() + "\n" + options_.layer + "\n";
}

}  // namespace tessera
