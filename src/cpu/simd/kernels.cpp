// SPDX-License-Identifier: Apache-2.0
// Compiles the inner loops once per instruction set and keeps the table of each.
#include "cpu/simd/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/element.h"
#include "base/half.h"
#include "tessera/error.h"

// The size of SVE vectors is unknown at compile time, so they cannot be elements of arrays, as register tiles need.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/cache_control.h>
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
}
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#include "cpu/simd/matmul-inl.h"
//
#include "cpu/simd/numbers-inl.h"
//
#include "cpu/simd/softmax-inl.h"
//
#include "cpu/simd/rows-inl.h"
//
#include "cpu/simd/residual-inl.h"
//
#include "cpu/simd/state-inl.h"
//
#include "cpu/simd/pairs-inl.h"
//
#include "cpu/simd/decode-inl.h"
//
#include "cpu/simd/expression-inl.h"
//
#include "cpu/simd/score_run-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

const Kernels* table() {
  static constexpr Kernels kTable = {"",
                                     HWY_NATIVE_FMA != 0,
                                     matmul,
                                     softmax_step,
                                     exp_rows,
                                     score_gradient,
                                     mask_window,
                                     softcap,
                                     load_rows,
                                     store_row,
                                     store_residual,
                                     add_residual,
                                     transpose,
                                     dot_rows,
                                     state_row_dot,
                                     state_row_add,
                                     all_finite,
                                     softmax_pairs,
                                     round_pairs,
                                     gradient_pairs,
                                     interleave,
                                     bf16_finite,
                                     scale_rows,
                                     add_row,
                                     decode_scores,
                                     decode_values,
                                     run_score,
                                     run_mask,
                                     subtract_distances,
                                     dropout_factors};
  return &kTable;
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu {

HWY_EXPORT(table);

namespace {

struct NamedTarget {
  std::string name;  // lower case: "avx3", "avx2", "sse4"
  Kernels kernels;
};

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

struct Targets {
  std::vector<NamedTarget> all;  // best first
  std::size_t usable;            // how many can run; those behind are emulated
};

Targets find_targets() {
  std::vector<NamedTarget> found;
  for (const auto target : hwy::SupportedAndGeneratedTargets()) {
    hwy::ChosenTarget chosen;
    chosen.Update(target);
    found.push_back({lower(hwy::TargetName(target)), *HWY_DISPATCH_TABLE(table)[chosen.GetIndex()]()});
  }
  const Kernels best = found.front().kernels;
  const auto with_dots = [&](const char* isa, const DotKernels* dots) {
    NamedTarget named{isa, best};
    named.kernels.dots = dots;
    return named;
  };
  if (const DotKernels* dots = avx512_bf16_kernels()) {
    found.insert(found.begin() + (avx512_bf16_is_fast() ? 0 : 1), with_dots("avx512_bf16", dots));
  }
  if (const DotKernels* dots = amx_bf16_kernels()) found.insert(found.begin(), with_dots("amx_bf16", dots));
  const std::size_t usable = found.size();
  for (const NamedDotKernels& dots : emulated_dot_kernels()) found.push_back(with_dots(dots.isa, dots.kernels));
  for (NamedTarget& named : found) named.kernels.isa = named.name.c_str();  // addresses are final now
  return {std::move(found), usable};
}

const Targets& targets() {
  static const Targets kTargets = find_targets();
  return kTargets;
}

std::vector<std::string> names(std::size_t begin, std::size_t end) {
  std::vector<std::string> found;
  for (std::size_t i = begin; i < end; ++i) found.push_back(targets().all[i].name);
  return found;
}

}  // namespace

const Kernels& kernels_for(std::string_view isa) {
  for (const NamedTarget& target : targets().all) {
    if (target.name == isa) return target.kernels;
  }
  std::string want;
  for (const std::string& name : names(0, targets().usable)) want += (want.empty() ? "" : ", ") + name;
  throw Error(ErrorCode::unsupported, "isa", std::string(isa), "one of " + want);
}

std::vector<std::string> usable_isas() { return names(0, targets().usable); }

std::vector<std::string> emulated_isas() { return names(targets().usable, targets().all.size()); }

Support has_kernels_of(std::initializer_list<DType> types) {
  for (const DType type : types) {
    if (detail::is_result(type)) continue;
    return Support::no("has no " + std::string(to_string(type)) + "; want " + detail::result_types());
  }
  return Support::yes();
}

}  // namespace tessera::cpu
#endif  // HWY_ONCE
