// SPDX-License-Identifier: Apache-2.0
// Compiles the inner loops once per instruction set and keeps the table of tables.
#include "cpu/kernels/kernels.h"

#include <cstring>
#include <limits>

#include "tessera/error.h"
#include "tessera/plan.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
}
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#include "cpu/kernels/matmul-inl.h"
//
#include "cpu/kernels/half-inl.h"
//
#include "cpu/kernels/softmax-inl.h"
//
#include "cpu/kernels/rows-inl.h"
//
#include "cpu/kernels/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

const Kernels* table() {
  static constexpr Kernels kTable = {
      "",        HWY_NATIVE_FMA != 0, matmul,    softmax_step, exp_rows,      score_gradient, mask_band, softcap,
      load_rows, store_row,           transpose, dot_rows,     state_row_dot, state_row_add,  all_finite};
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

const std::vector<NamedTarget>& targets() {
  static const std::vector<NamedTarget> kTargets = [] {
    std::vector<NamedTarget> found;
    for (const auto target : hwy::SupportedAndGeneratedTargets()) {
      hwy::ChosenTarget chosen;
      chosen.Update(target);
      found.push_back({lower(hwy::TargetName(target)), *HWY_DISPATCH_TABLE(table)[chosen.GetIndex()]()});
    }
    for (NamedTarget& named : found) named.kernels.isa = named.name.c_str();  // addresses are final now
    return found;
  }();
  return kTargets;
}

}  // namespace

const Kernels& kernels_for(std::string_view isa) {
  for (const NamedTarget& target : targets()) {
    if (target.name == isa) return target.kernels;
  }
  std::string names;
  for (const NamedTarget& target : targets()) names += (names.empty() ? "" : ", ") + target.name;
  throw Error(ErrorCode::unsupported, "isa", std::string(isa), "one of " + names);
}

}  // namespace tessera::cpu

namespace tessera {

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const auto& target : cpu::targets()) names.push_back(target.name);
  return names;
}

}  // namespace tessera
#endif  // HWY_ONCE
