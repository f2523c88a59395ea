// SPDX-License-Identifier: Apache-2.0
// Few queries on rows where they lie have the bits of the panels, whatever the exponents: subnormals are operands,
// products and sums here.
#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "cases/inputs/numbers.h"
#include "cpu/simd/kernels.h"
#include "tessera/plan.h"

namespace tessera::cpu {
namespace {

using Numbers = std::vector<std::uint16_t>;
constexpr std::int64_t kColumns = kDotTile;

// bf16 of any sign with biased exponents from `lowest` (0: subnormal) to `highest`.
Numbers draw(cases::RandomNumbers& random, std::int64_t count, std::int64_t lowest, std::int64_t highest) {
  Numbers numbers(static_cast<std::size_t>(count));
  for (std::uint16_t& number : numbers) {
    const std::int64_t sign = random.between(0, 1), exponent = random.between(lowest, highest);
    number = static_cast<std::uint16_t>(sign << 15 | exponent << 7 | random.between(0, 127));
  }
  return numbers;
}

std::vector<const std::byte*> rows_of(const Numbers& numbers, std::int64_t dim) {
  std::vector<const std::byte*> rows;
  for (std::size_t i = 0; i < numbers.size(); i += static_cast<std::size_t>(dim)) {
    rows.push_back(reinterpret_cast<const std::byte*>(numbers.data() + i));
  }
  return rows;
}

std::uint32_t bits(float number) { return std::bit_cast<std::uint32_t>(number); }

struct Exponents {
  std::int64_t lowest, highest;
};
// Subnormal sums; sums that lose parts; as in attention.
constexpr Exponents kExponents[] = {{0, 66}, {50, 180}, {120, 130}};

// task(kernels, random, lowest, highest) on every instruction set that has dot products, for all exponents.
template <class Task>
void for_all(std::uint64_t seed, const Task& task) {
  std::vector<std::string> isas = cpu_isas();
  for (const std::string& isa : emulated_isas()) isas.push_back(isa);
  for (const std::string& isa : isas) {
    const Kernels& kernels = kernels_for(isa);
    if (kernels.dots == nullptr) continue;
    const DotProducts products(kernels.dots);
    cases::RandomNumbers random(seed);
    for (const auto [lowest, highest] : kExponents) {
      SCOPED_TRACE(isa + " exponents to " + std::to_string(highest));
      task(kernels, random, lowest, highest);
    }
  }
}

TEST(DotKernels, FewScoresAreThePanels) {
  for_all(1, [](const Kernels& kernels, cases::RandomNumbers& random, std::int64_t lowest, std::int64_t highest) {
    for (const std::int64_t dim : {32, 96}) {
      const Numbers k = draw(random, kDecodeKeys * dim, lowest, highest);
      const Numbers q = draw(random, kDecodeQueries * dim, lowest, highest);
      std::vector<std::uint32_t> pairs(static_cast<std::size_t>(dim / 2 * kColumns));
      for (std::int64_t t = 0; t < dim; t += 2) {
        for (std::int64_t c = 0; c < kDecodeQueries; ++c) {
          const auto at = static_cast<std::size_t>(c * dim + t);
          pairs[static_cast<std::size_t>(t / 2 * kColumns + c)] = q[at] | std::uint32_t{q[at + 1]} << 16U;
        }
      }
      std::vector<float> panel(static_cast<std::size_t>(kDecodeKeys * kColumns));
      kernels.dots->matmul(kDecodeKeys, kColumns, dim, k.data(), dim, pairs.data(), kColumns, panel.data(), kColumns,
                           false, nullptr);
      const auto rows = rows_of(k, dim);
      for (const std::int64_t queries : {1, 4, 8}) {
        for (const std::int64_t keys : {std::int64_t{5}, kDecodeKeys}) {
          std::vector<float> s(static_cast<std::size_t>(kDecodeKeys * kPanel));
          kernels.dots->decode_scores(keys, rows.data(), dim, queries, q.data(), s.data(), {}, kernels.transpose);
          for (std::int64_t i = 0; i < keys * queries; ++i) {
            const std::int64_t key = i / queries, c = i % queries;
            ASSERT_EQ(bits(s[static_cast<std::size_t>(key * kPanel + c)]),
                      bits(panel[static_cast<std::size_t>(key * kColumns + c)]))
                << " dim " << dim << " queries " << queries;
          }
        }
      }
    }
  });
}

TEST(DotKernels, FewValuesAreThePanels) {
  constexpr std::int64_t kKeys = 96;
  for_all(2, [](const Kernels& kernels, cases::RandomNumbers& random, std::int64_t lowest, std::int64_t highest) {
    for (const std::int64_t dim : {16, 80}) {
      const Numbers v = draw(random, kKeys * dim, lowest, highest);
      const Numbers p = draw(random, kKeys * kPanel, lowest, highest);
      const Numbers sums = draw(random, dim * kDecodeQueries, 0, 2 * highest - 127 > 1 ? 2 * highest - 127 : 1);
      Numbers turned(v.size());
      std::vector<std::uint32_t> pairs(static_cast<std::size_t>(kKeys / 2 * kPanel));
      for (std::int64_t key = 0; key < kKeys; ++key) {
        for (std::int64_t t = 0; t < dim; ++t) {
          turned[static_cast<std::size_t>(t * kKeys + key)] = v[static_cast<std::size_t>(key * dim + t)];
        }
        for (std::int64_t c = 0; c < kPanel; ++c) {
          pairs[static_cast<std::size_t>(key / 2 * kPanel + c)] |=
              std::uint32_t{p[static_cast<std::size_t>(key * kPanel + c)]} << (key % 2 * 16);
        }
      }
      std::vector<float> panel(static_cast<std::size_t>(dim * kColumns));
      std::vector<float> few(static_cast<std::size_t>(kDecodeQueries * dim));
      for (std::int64_t i = 0; i < dim * kDecodeQueries; ++i) {
        const float sum = std::bit_cast<float>(std::uint32_t{sums[static_cast<std::size_t>(i)]} << 16U);
        few[static_cast<std::size_t>(i)] = panel[static_cast<std::size_t>(i % dim * kColumns + i / dim)] = sum;
      }
      kernels.dots->matmul(dim, kColumns, kKeys, turned.data(), kKeys, pairs.data(), kPanel, panel.data(), kColumns,
                           true, nullptr);
      const auto rows = rows_of(v, dim);
      for (const std::int64_t queries : {1, 4, 8}) {
        std::vector<float> o = few;
        kernels.dots->decode_values(kKeys / 2, rows.data(), dim, queries, pairs.data(), o.data(), {});
        for (std::int64_t i = 0; i < queries * dim; ++i) {
          ASSERT_EQ(bits(o[static_cast<std::size_t>(i)]),
                    bits(panel[static_cast<std::size_t>(i % dim * kColumns + i / dim)]))
              << " dim " << dim << " queries " << queries;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::cpu
