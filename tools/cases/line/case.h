// SPDX-License-Identifier: Apache-2.0
// A case: a problem line and the values that make it one run, all in one line of text. Everything random follows from
// the seed, so the line reruns exactly.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cases/line/input_kind.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cases {

/// How the large tensors lie in memory.
enum class Strides : std::uint8_t {
  packed,       // row-major
  heads_first,  // "bhsd": (batch, heads, seqlen, dim) or (heads, tokens, dim) underneath
  gaps,         // unused elements between rows, and a start aligned to one element only
  zero,         // q, k, v and what comes with them: the heads share one row
  negative,     // tokens backwards
  odd,          // rows an odd number of elements apart; not for a GPU, whose rows begin at multiples of 16 bytes
};

/// Lists hold one value for each sequence, or one value for all; empty takes the default.
struct Values {
  std::uint64_t seed = 1;
  // Lengths. Varlen: differences of cu_seqlens (default: full, while tokens last). Paged: lengths (default random).
  // Dense with seqused: the used lengths (default random). kv_append: lengths before the append.
  std::vector<std::int64_t> lens_q, lens_k, lens_k2;
  std::vector<std::int64_t> used_q, used_k, used_k2;        // seqused under varlen (default random)
  std::vector<std::int64_t> q_offset, k_offset, k_offset2;  // empty: unbound
  std::vector<std::int64_t> non_finite;                     // keys of the first source with values that are not finite
  std::vector<std::int64_t> non_finite_rows;  // queries that are NaN: of a backward dout of even ones, q of odd
  std::int64_t batch_offset = 0;
  std::int64_t head_offset = 0;
  std::uint64_t drop_seed = 0;
  std::uint64_t drop_offset = 0;
  bool drop_scalars = false;      // dropout's seed and offset are tensors
  float density = 0.5F;           // share of the tiles that a list holds
  bool shuffled_pages = false;    // pages=shuffled
  bool slopes_per_batch = false;  // alibi_slopes is (b, hq)
  bool extreme_slopes = false;    // alibi_slopes=extreme: 0, negative, tiny and huge ones
  bool extreme_sinks = false;     // sinks=extreme: −∞, and far below and above all scores
  bool rotate_q = false;          // kv_append also rotates q
  // linear_decode: slots of states (default: distinct ones in random order); where the new states go (default: the
  // same)
  std::vector<std::int64_t> state_slots, dest_slots;
  std::vector<std::int64_t> ring_cursors;  // one for each sequence (default: drawn, some of which flush)
  bool unbound_slots = false;              // state_slots=unbound: sequence b has state b
  bool long_slots = false;                 // slot_ids=int64
  bool no_decay = false;                   // slopes=zero
  bool unbound_gradients = false;          // dstates=unbound: neither dstate_final nor dstate_initial
  Strides strides = Strides::packed;
  InputKind inputs;  // of q, k and k2
  bool operator==(const Values&) const = default;
};

struct Case {
  Problem problem;
  Values values;
  Wishes wishes;
  std::string isa;  // "": the best this machine has
  int threads = 1;

  /// Problem keys (docs/grammar.md) and value keys in any order: seed= lens_q= lens_k= lens_k2= used_q= used_k=
  /// used_k2= q_offset= k_offset= k_offset2= non_finite= non_finite_rows= (lists with commas) batch_offset=
  /// head_offset= drop_seed= drop_offset= drop_scalars density= pages=shuffled slopes=batch rotate_q
  /// alibi_slopes=extreme sinks=extreme strides=packed|bhsd|gaps|zero|negative|odd inputs= tile_q= tile_kv= splits=
  /// implementation= isa= threads= state_slots= dest_slots= ring_cursors= state_slots=unbound slot_ids=int64
  /// slopes=zero dstates=unbound. Throws Error{parse}.
  static Case parse(std::string_view line);
  [[nodiscard]] std::string to_string() const;
  bool operator==(const Case&) const = default;
};

/// The cases of a file: one a line; blank lines and lines starting with '#' are skipped. Throws Error{io} or
/// Error{parse} naming file and line.
std::vector<Case> read_case_file(const std::string& path);

}  // namespace tessera::cases
