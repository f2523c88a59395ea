// SPDX-License-Identifier: Apache-2.0
// Partial results (O, LSE) over disjoint keys, and the last step of every result: the division by the softmax sum,
// which includes the sink exactly once.
#pragma once

#include <cstdint>

#include "base/parallel.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/sequence.h"
#include "plan/implementations.h"

namespace tessera::cpu {

/// fp32 partials of the splits: O (split, head, row, dv) and LSE (split, head, row); rows count over all sequences.
struct PartialResults {
  float* o = nullptr;
  float* lse = nullptr;
  std::int64_t heads = 0, rows = 0, dim = 0;

  static PartialResults place(Arena& arena, const Problem& problem, std::int64_t splits);
  [[nodiscard]] std::int64_t at(std::int64_t split, std::int64_t head, std::int64_t row) const {
    return (split * heads + head) * rows + row;
  }
  void write(std::int64_t split, std::int64_t head, std::int64_t row, const float* result, float value) const;
};

/// 1 / (sum + exp(sink − maximum)) for a sum relative to `maximum`; 0 for an empty row.
float softmax_inverse(float maximum, float sum, float sink);

/// Stores rows of O and, if the problem has residuals, what rounding them loses.
class OutputRows {
 public:
  OutputRows(const Problem& problem, const Bindings& bindings, const Sequence& sequence)
      : problem_(problem),
        o_(rows_of(problem, bindings[Slot::o], sequence)),
        residual_(rows_of(problem, bindings[Slot::o_residual], sequence)) {}
  [[nodiscard]] std::byte* at(std::int64_t row, std::int64_t head) const { return o_.at(row, head); }
  void store(const Kernels& kernels, const float* result, std::int64_t row, std::int64_t head) const;

 private:
  const Problem& problem_;
  RowView o_, residual_;
};

/// Merges the splits of every row into O and LSE.
void merge_partials(const PartialResults& partials, const detail::PlanState& state, const Bindings& bindings,
                    detail::Workers& workers, const Kernels& kernels);

/// Writes O = 0 and LSE = −inf for rows [begin, end) of a head. `zeros` is scratch for a row.
void write_empty_rows(const Problem& problem, const Bindings& bindings, const Kernels& kernels,
                      const Sequence& sequence, std::int64_t head, std::int64_t begin, std::int64_t end, float* zeros);

}  // namespace tessera::cpu
