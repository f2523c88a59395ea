// SPDX-License-Identifier: Apache-2.0
#include "cpu/reference/reference.h"

#include <array>
#include <cmath>
#include <utility>

#include "cpu/reference/number.h"
#include "cpu/reference/operations.h"
#include "operations/table.h"

namespace tessera::reference {

namespace {

using Compute = void (*)(const Problem&, const Bindings&, Arithmetic, std::uint32_t order, Result&);

template <std::size_t... kIndex>
constexpr std::array<Compute, sizeof...(kIndex)> computations(std::index_sequence<kIndex...> /*operations*/) {
  return {compute_operation<static_cast<Operation>(kIndex)>...};
}
constexpr auto kComputations = computations(std::make_index_sequence<detail::kOperations.size()>());

}  // namespace

Result compute(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order) {
  Result result;
  kComputations[static_cast<std::size_t>(problem.operation)](problem, bindings, arithmetic, order, result);
  return result;
}

void store(const Result& result, const Bindings& bindings) {
  for (std::size_t slot = 0; slot < result.outputs.size(); ++slot) {
    const Output& output = result.outputs[slot];
    const Tensor& tensor = bindings.tensors[slot];
    if (!tensor || output.values.empty()) continue;
    const bool residual = slot == static_cast<std::size_t>(Slot::o_residual);
    const DType o_type = bindings[Slot::o].dtype;
    for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
      const auto at = static_cast<std::size_t>(index);
      if (output.written[at] == 0) return;
      write(tensor, offset, residual ? residual_of(o_type, output.values[at]) : output.values[at]);
    });
  }
}

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) noexcept {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

std::uint32_t dropout_draw(std::uint64_t seed, std::uint64_t offset, std::uint32_t batch_head, std::uint32_t query,
                           std::uint32_t key) noexcept {
  const std::uint64_t philox_key = seed ^ ((offset >> 32) << 32);
  const std::array<std::uint32_t, 4> words =
      philox({key / 16 * 4 + key % 8 / 2, query / 16 * 8 + query % 8, batch_head, static_cast<std::uint32_t>(offset)},
             {static_cast<std::uint32_t>(philox_key), static_cast<std::uint32_t>(philox_key >> 32)});
  const std::uint32_t draw = key % 16 / 8 * 4 + query % 16 / 8 * 2 + key % 2;
  return (words[draw / 2] >> (16 * (draw % 2))) & 0xffffU;
}

std::uint32_t dropout_threshold(float probability_of_dropping) noexcept {
  return static_cast<std::uint32_t>(std::lround((1.0 - static_cast<double>(probability_of_dropping)) * 65536.0));
}

}  // namespace tessera::reference
