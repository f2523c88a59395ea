// SPDX-License-Identifier: Apache-2.0
#include "cases/random/draw.h"

#include <numeric>

#include "cases/random/extremes.h"

namespace tessera::cases {
namespace {

/// Consecutive problems for a GPU that share what is compiled into a kernel.
constexpr std::uint64_t kSameKernel = 64;

}  // namespace

RandomDraw::RandomDraw(std::uint64_t seed, std::uint64_t index, const std::vector<std::string>& isas)
    : random_(seed, index), chooser_(random_), p_(case_.problem), v_(case_.values) {
  v_.seed = random_.bits() >> 40;
  if (!isas.empty() && random_.chance(0.7)) {
    case_.isa = isas[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(isas.size())))];
  }
  if (random_.chance(0.08)) case_.threads = 2;
  v_.strides = random_strides(random_, false);
}

RandomDraw::RandomDraw(std::uint64_t seed, std::uint64_t index)
    : random_(seed, index),
      kernel_(~seed, index / kSameKernel),
      chooser_(kernel_),
      gpu_(true),
      p_(case_.problem),
      v_(case_.values) {
  v_.seed = random_.bits() >> 40;
  v_.strides = random_strides(random_, true);
}

void RandomDraw::types() {
  if (gpu_) {
    p_.q_type = p_.k_type = p_.v_type = p_.o_type = chooser_.chance(0.5) ? DType::bf16 : DType::fp16;
    if (chooser_.chance(0.2)) p_.o_type = DType::fp32;
    return;
  }
  static constexpr DType kTypes[] = {DType::fp32, DType::fp16, DType::bf16};
  p_.q_type = p_.k_type = p_.v_type = p_.o_type = random_.pick(kTypes);
  if (random_.chance(0.25)) {
    for (DType* type : {&p_.q_type, &p_.k_type, &p_.v_type, &p_.o_type}) *type = random_.pick(kTypes);
  }
}

std::int64_t RandomDraw::head_dim() {
  if (gpu_) {
    // Kernels are compiled for these; what lies between runs padded.
    static constexpr std::int64_t kDims[] = {32, 64, 64, 96, 128, 128, 192, 256, 512};
    const std::int64_t dim = chooser_.pick(kDims);
    return random_.chance(0.6) ? dim : dim - 8 * random_.between(1, 3);
  }
  if (random_.chance(0.06)) return 8 * random_.between(9, 64);
  return random_.chance(0.7) ? 8 * random_.between(1, 4) : 8 * random_.between(5, 8);
}

void RandomDraw::heads_and_dims() {
  p_.batch = random_.chance(0.5) ? 1 : random_.between(2, 3);
  p_.heads_kv = random_.chance(0.6) ? 1 : random_.between(2, 3);
  p_.heads_q = p_.heads_kv * (random_.chance(0.55) ? 1 : random_.between(2, 4));
  p_.head_dim_qk = head_dim();
  p_.head_dim_v = chooser_.chance(0.7) ? p_.head_dim_qk : head_dim();
}

std::int64_t RandomDraw::page_size() {
  static constexpr std::int64_t kSizes[] = {1, 2, 7, 8, 16, 16, 24, 32, 64};
  return random_.pick(kSizes);
}

std::int64_t RandomDraw::length(std::int64_t longest, bool full) {
  if (full) return longest;
  return random_.chance(0.12) ? 0 : random_.between(0, longest);
}

void RandomDraw::query_sizes(std::int64_t longest) {
  p_.seqlen_q = longest;
  const bool varlen = random_.chance(0.33);
  p_.seqused_q = random_.chance(0.2);
  if (varlen) {
    p_.q_layout = Layout::varlen;
    for (std::int64_t b = 0; b < p_.batch; ++b) v_.lens_q.push_back(length(longest, b == 0));
    p_.total_q = std::accumulate(v_.lens_q.begin(), v_.lens_q.end(), random_.between(0, 5));
  }
  if (!p_.seqused_q) return;
  std::vector<std::int64_t>& used = varlen ? v_.used_q : v_.lens_q;
  for (std::int64_t b = 0; b < p_.batch; ++b) {
    const std::int64_t most = varlen ? v_.lens_q[static_cast<std::size_t>(b)] : longest;
    used.push_back(b == 0 && p_.batch > 1 ? most : length(most, random_.chance(0.3)));
  }
}

void RandomDraw::seeds() {
  v_.drop_seed = random_.bits();
  v_.drop_offset = random_.chance(0.5) ? random_.bits() : random_.bits() >> 48;
  v_.drop_scalars = random_.chance(0.4);
}

}  // namespace tessera::cases
