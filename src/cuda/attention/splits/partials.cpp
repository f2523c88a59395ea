// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/splits/partials.h"

namespace tessera::cuda {
namespace {

// Returns the number of rows of all sequences.
std::int64_t all_rows(const Problem& problem) {
  return problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
}

}  // namespace

Partials::Partials(const Problem& problem, std::int64_t count)
    : o_part(all_rows(problem) * problem.heads_q * problem.head_dim_v),
      lse_part(all_rows(problem) * problem.heads_q),
      splits(count) {}

std::size_t partials_bytes(const Problem& problem, std::int64_t splits) {
  return splits > 1 ? (Partials(problem, splits).bytes() + 63) / 64 * 64 : 0;
}

CombineParams redirect_to(const Partials& partials, std::byte* workspace, const Problem& problem, FwdParams& params) {
  CombineParams c{};
  c.o = params.o;
  c.lse = params.lse;
  c.sinks = params.sinks;
  c.sinks_stride = params.sinks_stride;
  c.o_strides = params.o_strides;
  c.lse_strides = params.lse_strides;
  const bool varlen = problem.q_layout == Layout::varlen;
  const i64 heads = problem.heads_q;
  const i64 dv = problem.head_dim_v;
  params.o = workspace;
  params.lse = reinterpret_cast<float*>(workspace + partials.o_bytes());
  params.sinks = nullptr;
  params.o_strides = {varlen ? 0 : problem.seqlen_q * heads * dv, heads * dv, dv};
  params.lse_strides = {varlen ? 0 : problem.seqlen_q * heads, heads, 1};
  params.splits = Divisor(static_cast<int>(partials.splits));
  params.o_split = partials.o_part;
  params.lse_split = partials.lse_part;
  c.o_parts = params.o;
  c.lse_parts = params.lse;
  c.o_part = partials.o_part;
  c.lse_part = partials.lse_part;
  c.o_parts_strides = params.o_strides;
  c.lse_parts_strides = params.lse_strides;
  c.parts = static_cast<int>(partials.splits);
  c.heads = Divisor(static_cast<int>(heads));
  c.dv = params.dv;
  c.seqlen_q = params.seqlen_q;
  c.total_q = params.total_q;
  c.cu_seqlens_q = params.cu_seqlens_q;
  return c;
}

}  // namespace tessera::cuda
