// SPDX-License-Identifier: Apache-2.0
// Attention with one key: every output row must be that key's value, whatever the scores are.
#include <tessera/attention.h>
#include <tessera/version.h>

#include <cstdio>
#include <vector>

int main() {
  using tessera::DType;
  using tessera::Tensor;
  constexpr int kRows = 5;
  constexpr int kHeads = 2;
  constexpr int kDim = 16;
  std::vector<float> q(kRows * kHeads * kDim, 0.5F);
  std::vector<float> k(kHeads * kDim, -1.0F);
  std::vector<float> v(kHeads * kDim);
  std::vector<float> o(q.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  tessera::attention(Tensor::contiguous(q.data(), DType::fp32, {1, kRows, kHeads, kDim}),
                     Tensor::contiguous(k.data(), DType::fp32, {1, 1, kHeads, kDim}),
                     Tensor::contiguous(v.data(), DType::fp32, {1, 1, kHeads, kDim}),
                     Tensor::contiguous(o.data(), DType::fp32, {1, kRows, kHeads, kDim}));
  for (std::size_t i = 0; i < o.size(); ++i) {
    if (o[i] != v[i % v.size()]) {
      std::printf("o[%zu]: got %g; want %g\n", i, o[i], v[i % v.size()]);
      return 1;
    }
  }
  std::printf("tessera %s from C++\n", tessera::version());
  return 0;
}
