// SPDX-License-Identifier: Apache-2.0
#include "bench/probe.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "cpu/simd/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Each kernel runs `rounds` rounds of multiply-adds on accumulators that stay in registers, enough of them to hide the
// latency (4 cycles × 2 units), and returns the operations done. The sums go to `sink` so that they are not dropped.
using FmaKernel = double (*)(std::int64_t rounds, float* sink);

double fma_portable(std::int64_t rounds, float* sink) {
  constexpr int kLanes = 64;
  float sums[kLanes] = {};
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (float& sum : sums) sum = sum * 0.999F + 0.5F;
  }
  for (const float sum : sums) *sink += sum;
  return 2.0 * kLanes * static_cast<double>(rounds);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) double fma_avx2(std::int64_t rounds, float* sink) {
  constexpr int kSums = 12;
  const __m256 a = _mm256_set1_ps(0.999F), b = _mm256_set1_ps(0.5F);
  __m256 sums[kSums];
  for (auto& sum : sums) sum = b;
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int at = 0; at < kSums; ++at) sums[at] = _mm256_fmadd_ps(sums[at], a, b);
  }
  float lanes[8];
  for (const auto& sum : sums) {
    _mm256_storeu_ps(lanes, sum);
    *sink += lanes[0];
  }
  return 2.0 * 8 * kSums * static_cast<double>(rounds);
}

__attribute__((target("avx512f"))) double fma_avx512(std::int64_t rounds, float* sink) {
  constexpr int kSums = 24;
  const __m512 a = _mm512_set1_ps(0.999F), b = _mm512_set1_ps(0.5F);
  __m512 sums[kSums];
  for (auto& sum : sums) sum = b;
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int at = 0; at < kSums; ++at) sums[at] = _mm512_fmadd_ps(sums[at], a, b);
  }
  float lanes[16];
  for (const auto& sum : sums) {
    _mm512_storeu_ps(lanes, sum);
    *sink += lanes[0];
  }
  return 2.0 * 16 * kSums * static_cast<double>(rounds);
}
#endif

FmaKernel best_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fma_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return fma_avx2;
#endif
  return fma_portable;
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs `work(thread)` on every thread at once and returns the seconds until the last one is done.
double run_threads(int threads, const std::function<void(int)>& work) {
  const auto start = Clock::now();
  std::vector<std::thread> others;
  for (int at = 1; at < threads; ++at) others.emplace_back(work, at);
  work(0);
  for (std::thread& other : others) other.join();
  return seconds_since(start);
}

// Attempts, of which the best counts: at least five, and long enough for the system to spread threads over processors.
class Attempts {
 public:
  [[nodiscard]] bool more() { return count_++ < 5 || seconds_since(start_) < 0.25; }

 private:
  Clock::time_point start_ = Clock::now();
  int count_ = 0;
};

// `kernel(rounds, sink)` on every thread at once.
double measure_gflops(int threads, const std::function<double(std::int64_t, float*)>& kernel) {
  std::vector<float> sinks(static_cast<std::size_t>(threads) * 16);  // a cache line each
  double best = 0;
  for (Attempts attempts; attempts.more();) {
    std::vector<double> done(static_cast<std::size_t>(threads) * 8);
    const double seconds = run_threads(threads, [&](int thread) {
      const auto at = static_cast<std::size_t>(thread);
      done[at * 8] = kernel(6'000'000, &sinks[at * 16]);
    });
    double total = 0;
    for (const double each : done) total += each;
    best = std::max(best, total / seconds * 1e-9);
  }
  return best;
}

// Words that lie `ahead` are asked for: some processors read faster so, others as fast as without.
std::uint64_t sum_words(const std::uint64_t* words, std::size_t count, std::size_t ahead) {
  std::uint64_t sums[8] = {};
  for (std::size_t at = 0; at + 8 <= count; at += 8) {
    __builtin_prefetch(words + at + std::min(ahead, count - at - 1));
    for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += words[at + lane];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

double measure_gbytes_s(int threads) {
  constexpr std::size_t kBytes = std::size_t{1} << 29U;  // 512 MiB, above the last cache of what is sold today
  const std::size_t words = kBytes / sizeof(std::uint64_t);
  const std::vector<std::uint64_t> memory(words, 1);
  std::vector<std::uint64_t> sinks(static_cast<std::size_t>(threads) * 8);
  double best = 0;
  std::size_t ahead = 0;
  for (Attempts attempts; attempts.more(); ahead = ahead == 0 ? 512 : 0) {
    const double seconds = run_threads(threads, [&](int thread) {
      const std::size_t share = words / static_cast<std::size_t>(threads);
      const auto at = static_cast<std::size_t>(thread);
      sinks[at * 8] += sum_words(memory.data() + at * share, share, ahead);
    });
    best = std::max(best, static_cast<double>(kBytes) / seconds * 1e-9);
  }
  return best;
}

}  // namespace

double Roofline::seconds(double flops, double bytes, bool bf16) const noexcept {
  const double limit = bf16 && dot_gflops > 0 ? dot_gflops : gflops;
  return std::max(limit > 0 ? flops / limit : 0.0, gbytes_s > 0 ? bytes / gbytes_s : 0.0) * 1e-9;
}

Roofline measure_roofline(int threads, const std::string& isa) {
  Roofline roofline;
  roofline.threads = threads;
  roofline.gflops = measure_gflops(threads, best_kernel());
  roofline.gbytes_s = measure_gbytes_s(threads);
  if (const cpu::DotKernels* dots = cpu::kernels_for(isa).dots) {
    roofline.dot_gflops = measure_gflops(threads, [&](std::int64_t rounds, float*) {
      dots->begin();
      const double operations = dots->peak(rounds / 8);
      dots->end();
      return operations;
    });
  }
  return roofline;
}

}  // namespace tessera::cli
