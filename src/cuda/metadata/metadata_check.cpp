// SPDX-License-Identifier: Apache-2.0
#include "cuda/metadata/metadata_check.h"

#include "bindings/slot_rules.h"
#include "cuda/attention/params.h"
#include "cuda/source/kernel_text.h"
#include "shared/metadata.h"

namespace tessera::cuda {
namespace {

constexpr std::uint32_t kThreads = 512;  // MetadataCheck::kThreads

const int* ints(const Tensor& tensor) { return tensor ? tensor.as<int>() : nullptr; }

MetadataSource source_of(const KvSource& kv, const Bindings& bindings, bool second) {
  const detail::SourceSlots& slots = detail::source_slots(second);
  const bool table = kv.layout == KvLayout::paged_table;
  MetadataSource source{};
  source.kv = kv_params(kv, bindings, second ? 1 : 0);
  source.cu_seqlens_slot = static_cast<int>(slots.cu_seqlens);
  source.seqused_slot = static_cast<int>(slots.seqused);
  source.page_slot = static_cast<int>(table ? slots.page_table : slots.page_indices);
  source.indptr_slot = static_cast<int>(slots.page_indptr);
  source.last_slot = static_cast<int>(slots.last_page_len);
  return source;
}

MetadataList list_of(const Problem& problem, const Bindings& bindings, TileList::Form form, Slot counts_slot,
                     Slot indices_slot) {
  MetadataList list{};
  const Tensor& counts = bindings[counts_slot];
  const Tensor& indices = bindings[indices_slot];
  if (!counts || !indices) return list;
  list.counts = ints(counts);
  list.indices = ints(indices);
  for (std::size_t i = 0; i < 3; ++i) {
    list.counts_strides[i] = counts.strides[i];
    list.indices_strides[i] = indices.strides[i];
  }
  list.batch = static_cast<int>(counts.shape[0]);
  list.heads = static_cast<int>(counts.shape[1]);
  list.lines = static_cast<int>(counts.shape[2]);
  list.capacity = reachable(indices.shape[3]);
  const bool by_key = form == TileList::Form::transposed;
  list.limit = static_cast<int>(by_key ? problem.query_blocks() : problem.key_blocks());
  list.counts_slot = static_cast<int>(counts_slot);
  list.indices_slot = static_cast<int>(indices_slot);
  return list;
}

}  // namespace

KernelSource metadata_check_source() {
  return {"metadata_check", to_string({.file = "cuda/metadata/metadata_check.cuh",
                                       .bounds = "MetadataCheck::kThreads",
                                       .parameters = {"MetadataParams params"},
                                       .call = "MetadataCheck::run(params)"})};
}

void launch_metadata_check(const Problem& problem, const Bindings& bindings, const Kernel& kernel, Stream stream) {
  const Tensor& status = bindings[Slot::status];
  if (!status) return;
  MetadataParams params{};
  params.batch = static_cast<int>(problem.batch);
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.total_q = static_cast<int>(problem.total_q);
  params.cu_seqlens_q = ints(bindings[Slot::cu_seqlens_q]);
  params.seqused_q = ints(bindings[Slot::seqused_q]);
  params.cu_seqlens_q_slot = static_cast<int>(Slot::cu_seqlens_q);
  params.seqused_q_slot = static_cast<int>(Slot::seqused_q);
  params.source[0] = source_of(problem.kv, bindings, false);
  if (problem.kv2) params.source[1] = source_of(*problem.kv2, bindings, true);
  params.sources = problem.kv2 ? 2 : 1;
  params.appends = problem.operation == Operation::kv_append;
  // A backward with a list of its own does not use the forward's.
  const bool own = bool{problem.bwd_list};
  if (const TileList& list = own ? problem.bwd_list : problem.list) {
    const detail::ListSlots& slots = detail::list_slots(own);
    params.list[0] = list_of(problem, bindings, list.form, slots.counts, slots.indices);
    params.list[1] = list_of(problem, bindings, list.form, slots.full_counts, slots.full_indices);
  }
  for (const Slot slot : {Slot::state_slots, Slot::dest_slots}) {
    const Tensor& slots = bindings[slot];
    MetadataSlots& states = params.states[slot == Slot::dest_slots ? 1 : 0];
    states = {slots ? slots.bytes() : nullptr, slots.dtype == DType::int64, static_cast<int>(slot)};
  }
  params.state_count = problem.linear.states;
  params.cursors = ints(bindings[Slot::ring_cursor]);
  params.cursor_limit = static_cast<int>(2 * problem.linear.ring + 1);
  params.cursor_slot = static_cast<int>(Slot::ring_cursor);
  params.status = status.as<int>();
  void* parameters[] = {&params};
  kernel.launch({}, {kThreads}, 0, stream.handle, parameters);
}

}  // namespace tessera::cuda
