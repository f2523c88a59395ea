// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/params.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/checked.h"
#include "bindings/slot_rules.h"
#include "problem/registered_callables.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

template <class T>
const T* pointer(const Tensor& tensor) {
  return tensor ? tensor.as<T>() : nullptr;
}

// A dimension of one element may have any stride, which is replaced by 0.
i64 stride_of(const Tensor& tensor, std::size_t dimension) {
  return tensor.shape[dimension] > 1 ? tensor.strides[dimension] : 0;
}

i64 bounded(const std::optional<std::int64_t>& side) {
  return side ? std::clamp<i64>(*side, -kUnbounded, kUnbounded) : kUnbounded;
}

DropoutParams dropout_params(const Problem& problem, const Bindings& bindings) {
  DropoutParams p{};
  p.threshold = static_cast<u32>(std::lround((1.0 - static_cast<double>(problem.dropout)) * 65536.0));
  p.scale = p.threshold == 0 ? 0.0F : 65536.0F / static_cast<float>(p.threshold);
  p.seed = bindings.seed;
  p.offset = bindings.offset;
  p.seed_at = pointer<u64>(bindings[Slot::dropout_seed]);
  p.offset_at = pointer<u64>(bindings[Slot::dropout_offset]);
  p.first_head_batch = bindings.batch_offset * problem.heads_q + bindings.head_offset;
  p.heads = problem.heads_q;
  return p;
}

// The parameters of an extra tensor that is bound.
ExtraParams extra_params(const Tensor& tensor) {
  ExtraParams p{};
  p.data = tensor.bytes();
  for (int i = 0; i < tensor.rank; ++i) {
    p.sizes[i] = tensor.shape[static_cast<std::size_t>(i)];
    if (i + 1 < tensor.rank) p.strides[i] = tensor.strides[static_cast<std::size_t>(i)];
  }
  return p;
}

bool finds_early(const Problem& problem, const FwdParams& p) {
  const auto in_memory = [](const KvParams& kv) {
    return kv.cu_seqlens != nullptr || kv.seqused != nullptr || kv.page_indptr != nullptr || kv.offset != nullptr;
  };
  return !problem.list && p.cu_seqlens_q == nullptr && p.seqused_q == nullptr && p.q_offset == nullptr &&
         !in_memory(p.kv[0]) && !in_memory(p.kv[1]) && p.dropout.seed_at == nullptr && p.dropout.offset_at == nullptr;
}

constexpr std::int64_t kMostRowStride = std::int64_t{1} << 29;  // elements, up to 4 bytes each: 32 bits hold the bytes

}  // namespace

bool is_paged(const KvSource& source) {
  return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
}

void check_row_strides(const Bindings& bindings, std::span<const Slot> slots) {
  for (const Slot slot : slots) {
    const i64 stride = row_strides(bindings[slot]).row;
    if (std::abs(stride) < kMostRowStride) continue;
    throw Error(ErrorCode::unsupported, std::string(to_string(slot)),
                "a stride of " + std::to_string(stride) + " elements between rows",
                "less than " + std::to_string(kMostRowStride) + " either way on cuda");
  }
}

Strides row_strides(const Tensor& tensor) {
  if (!tensor) return {};
  if (tensor.rank == 3) return {0, stride_of(tensor, 0), stride_of(tensor, 1)};
  return {stride_of(tensor, 0), stride_of(tensor, 1), stride_of(tensor, 2)};
}

Strides lse_strides(const Tensor& tensor) {
  if (!tensor) return {};
  if (tensor.rank == 2) return {0, stride_of(tensor, 1), stride_of(tensor, 0)};
  return {stride_of(tensor, 0), stride_of(tensor, 2), stride_of(tensor, 1)};
}

KvParams kv_params(const KvSource& source, const Bindings& bindings, int segment) {
  const detail::SourceSlots& slots = detail::source_slots(segment == 1);
  KvParams kv{};
  const Tensor& k = bindings[slots.k];
  kv.k = k.bytes();
  kv.v = bindings[slots.v].bytes();
  kv.k_strides = row_strides(k);
  kv.v_strides = row_strides(bindings[slots.v]);
  kv.capacity = is_paged(source) && source.pages == 0 ? 0 : static_cast<int>(source.seqlen);  // whatever lengths say
  kv.total = static_cast<int>(source.total);
  kv.cu_seqlens = pointer<int>(bindings[slots.cu_seqlens]);
  kv.seqused = pointer<int>(bindings[slots.seqused]);
  kv.offset = pointer<i64>(bindings[slots.offset]);
  constexpr std::int64_t longest = std::numeric_limits<int>::max() / 2;  // of all sequences
  kv.page_size = Divisor(static_cast<int>(std::clamp<std::int64_t>(source.page_size, 1, longest)));
  kv.pages = static_cast<int>(source.pages);
  if (source.layout == KvLayout::paged_table) {
    const Tensor& table = bindings[slots.page_table];
    kv.page_table = table.as<int>();
    kv.page_table_stride = table.strides[0];
    kv.page_indices = reachable(table.shape[1]);
  } else if (source.layout == KvLayout::paged_csr) {
    kv.page_table = bindings[slots.page_indices].as<int>();
    kv.page_indices = reachable(bindings[slots.page_indices].shape[0]);
    kv.page_indptr = bindings[slots.page_indptr].as<int>();
    kv.last_page_len = pointer<int>(bindings[slots.last_page_len]);
  }
  return kv;
}

FwdParams fwd_params(const Problem& problem, const Bindings& bindings, int group) {
  FwdParams p{};
  p.q = bindings[Slot::q].bytes();
  p.o = bindings[Slot::o].bytes();
  p.lse = const_cast<float*>(pointer<float>(bindings[Slot::lse]));
  p.q_strides = row_strides(bindings[Slot::q]);
  p.o_strides = row_strides(bindings[Slot::o]);
  p.lse_strides = lse_strides(bindings[Slot::lse]);
  p.batch = static_cast<int>(problem.batch);
  p.heads_a_kv = Divisor(static_cast<int>(problem.group()));
  p.group = Divisor(group);
  p.d = static_cast<int>(problem.head_dim_qk);
  p.dv = static_cast<int>(problem.head_dim_v);
  p.seqlen_q = static_cast<int>(problem.seqlen_q);
  p.total_q = static_cast<int>(problem.total_q);
  p.cu_seqlens_q = pointer<int>(bindings[Slot::cu_seqlens_q]);
  p.seqused_q = pointer<int>(bindings[Slot::seqused_q]);
  p.q_offset = pointer<i64>(bindings[Slot::q_offset]);
  p.kv[0] = kv_params(problem.kv, bindings, 0);
  if (problem.kv2) p.kv[1] = kv_params(*problem.kv2, bindings, 1);
  p.batch_offset = bindings.batch_offset;
  p.head_offset = bindings.head_offset;
  p.scale = problem.softmax_scale();
  if (problem.softcap > 0.0F) p.softcap = SoftcapParams(problem.softcap);
  p.slopes = pointer<float>(bindings[Slot::alibi_slopes]);
  if (const Tensor& slopes = bindings[Slot::alibi_slopes]) {
    p.slopes_batch = slopes.rank == 2 ? slopes.strides[0] : 0;
    p.slopes_head = slopes.strides[static_cast<std::size_t>(slopes.rank - 1)];
  }
  p.sinks = pointer<float>(bindings[Slot::sink]);
  if (p.sinks != nullptr) p.sinks_stride = bindings[Slot::sink].strides[0];
  if (problem.dropout > 0.0F) p.dropout = dropout_params(problem, bindings);
  p.window_left = bounded(problem.window.left);
  p.window_right = bounded(problem.window.right);
  if (problem.compressed_causal) {
    p.compressed_length = problem.compressed_causal->length;
    p.compressed_stride = problem.compressed_causal->stride;
  }
  if (problem.chunk > 0) {
    p.chunk.size = WideDivisor(static_cast<u64>(problem.chunk));
    p.chunk.above = round_up(2 * detail::kMaxPosition, problem.chunk);
  }
  p.splits = Divisor(1);
  for (int i = 0; i < kMaxExtras; ++i) {
    if (const Tensor& extra = bindings[detail::extra_slot(i)]) p.extras[i] = extra_params(extra);
  }
  p.finds_early = finds_early(problem, p);
  return p;
}

}  // namespace tessera::cuda
