// SPDX-License-Identifier: Apache-2.0
// Textbook attention, one query row after another: the executable form of docs/semantics.md. It shares nothing with the
// fast path: not its lengths, pages, positions, lists, conversions or dropout. It may allocate and is slow.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::reference {

enum class Arithmetic : std::uint8_t {
  oracle,  // double throughout, nothing rounded
  plain,  // fp32, and what an unfused implementation of the inputs' dtype would round on its way: the scores after each
          // step, P, dP, dS are rounded to the narrowest of q, k, v's types, outputs to their own. Only a yardstick for
          // the error that the dtype itself costs.
  byte_products,  // plain, where q, k and v are e4m3 and so is P (docs/quantization.md): P is rounded to e4m3, and of
                  // the summands of 32 products as many bits are kept as tensor cores of SM90 keep
};

/// An output in the row-major order of its tensor's shape. The output of o_residual is O before it is rounded; store()
/// computes the residual from it.
struct Output {
  std::vector<double> values;
  std::vector<std::uint8_t> written;  // 0: must be left as it was (slack tokens, cache lines of others)

  /// So many elements, none written yet.
  void resize(std::int64_t count) {
    values.assign(static_cast<std::size_t>(count), 0.0);
    written.assign(static_cast<std::size_t>(count), 0);
  }
  void set(std::int64_t index, double value) {
    values[static_cast<std::size_t>(index)] = value;
    written[static_cast<std::size_t>(index)] = 1;
  }
};

struct Result {
  std::array<Output, static_cast<std::size_t>(Slot::count_)> outputs;  // an output the problem lacks is empty
  // The values that decided the next list: (b, hq, query blocks, key blocks). With a skip state they are masses or
  // rises of the maximum in log2, and NaN for tiles that were not computed.
  std::vector<double> next_mass;
  // The same for blocks of compressed keys, from nsa_select with compressed_top.
  std::vector<double> compressed_scores;

  Output& operator[](Slot slot) { return outputs[static_cast<std::size_t>(slot)]; }
  const Output& operator[](Slot slot) const { return outputs[static_cast<std::size_t>(slot)]; }
};

/// Computes any operation from validated bindings. Output tensors are only read: their old content matters if gradients
/// accumulate, and where kv_append leaves the cache alone. An `order` other than 0 gives the same result with other
/// rounding errors: sums over dims, keys and rows are shuffled. If it is odd, q is scaled before the products,
/// exponentials are to base 2 and nothing between inputs and outputs is rounded below fp32 (a narrow type can hide an
/// error: a P of 1.0000001 is 1 in fp16). If it is even and not 0, numbers that are rounded to fp16 have no upper
/// bound.
Result compute(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order = 0);

/// Writes the computed values into the bound outputs, rounded to their types.
void store(const Result& result, const Bindings& bindings);

/// Philox4x32-10 (Salmon et al. 2011): the counter's ten rounds under a two-word key.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) noexcept;

/// The 16-bit draw for one element of the score matrix, all positions taken as uint32; kept if it is less than
/// dropout_threshold(p).
std::uint32_t dropout_draw(std::uint64_t seed, std::uint64_t offset, std::uint32_t batch_head, std::uint32_t query,
                           std::uint32_t key) noexcept;
std::uint32_t dropout_threshold(float probability_of_dropping) noexcept;

}  // namespace tessera::reference
