// SPDX-License-Identifier: Apache-2.0
// From tensors in files and a few words of the user to a whole problem.
#pragma once

#include <string>

#include "cases/inputs/slot_shapes.h"
#include "tessera/problem.h"

namespace tessera::cli {

/// A problem and what its tensors lacked: a batch dimension in front.
struct RunProblem {
  Problem problem;
  bool q_without_batch = false;   // q (tokens, heads, dim) without cu_seqlens_q: batch 1
  bool kv_without_batch = false;  // as q, for k and v (and their gradients)
};

/// Whether a run of this problem text reads the slot. `text` holds the user's words of the grammar.
bool is_input(Slot slot, const std::string& text);

/// The first word of `text` may be an operation (default attention). Sizes, dtypes, layouts and the flags that tensors
/// imply (seqused_q, sink, …) come from `arrays` unless the text gives the key. Throws Error naming the tensor.
RunProblem problem_of(Arrays& arrays, const std::string& text);

}  // namespace tessera::cli
