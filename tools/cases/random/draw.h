// SPDX-License-Identifier: Apache-2.0
// What random cases of every operation are drawn with: types, heads and dims, lengths; and the operations beside
// attention.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cases/inputs/numbers.h"
#include "cases/line/case.h"

namespace tessera::cases {

/// Which cases are drawn.
struct RandomScope {
  /// Above 0: attention forwards of at most so many queries a sequence, of long keys, mostly in pages and often in
  /// parts; and mixed batches, where one sequence in eight has more.
  std::int64_t queries = 0;
};

class RandomDraw {
 public:
  RandomDraw(std::uint64_t seed, std::uint64_t index, const std::vector<std::string>& isas);
  /// For a GPU: what a kernel is compiled for comes from a sequence of its own that moves on every 64 problems.
  RandomDraw(std::uint64_t seed, std::uint64_t index);
  RandomDraw(const RandomDraw&) = delete;
  RandomDraw& operator=(const RandomDraw&) = delete;

 protected:
  void types();
  void heads_and_dims();
  std::int64_t page_size();
  /// A sequence's length: the longest if it is to be full, else any, often 0.
  std::int64_t length(std::int64_t longest, bool full);
  /// Layout and lengths of the queries; the first sequence is full where the case is to span tiles.
  void query_sizes(std::int64_t longest);
  void seeds();

  void combine();
  void kv_append();
  void linear_decode();
  void linear_chunk();
  void nsa_pool();
  void nsa_select();
  void nsa_gate();
  void quantize();
  /// Of a forward, now and then: operands of 8 bits and how their descales are laid out.
  void eight_bits();

  RandomNumbers random_;
  RandomNumbers kernel_{0, 0};
  RandomNumbers& chooser_;  // of what is compiled into kernels; on the CPU nothing is, and it is random_
  bool gpu_ = false;
  Case case_;
  Problem& p_;
  Values& v_;

 private:
  std::int64_t head_dim();
  void grain(RandomNumbers& random);
  void types_of_eight_bits(RandomNumbers& random);
  void types_of_gpu_bytes(RandomNumbers& random);
  /// Tokens of keys, dense or packed, and their compression.
  void key_tokens();
  /// A pool, and slots of the sequences in it.
  void state_slots(bool elsewhere);
};

}  // namespace tessera::cases
