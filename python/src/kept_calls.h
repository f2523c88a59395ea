// SPDX-License-Identifier: Apache-2.0
// Calls that were made before, found again by what decides how they are computed.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/tensor.h"
#include "torch_run.h"

namespace tessera::python {

/// What decides how a call with three tensors and options is computed.
struct CallKey {
  struct Rows {
    DType dtype = DType::fp32;
    int rank = 0;
    std::array<std::int64_t, Tensor::kMaxRank> shape{};
    bool operator==(const Rows&) const = default;
  };
  std::array<Rows, 3> rows;  // q, k, v
  Device device;
  int threads = 0;               // on a GPU 0
  bool recorded = false;         // for a backward
  nanobind::object options;      // a tuple of None, bool, int, float, str and tuples of such
  std::size_t options_hash = 0;  // of their types and values
};

/// A table of calls and of what computes them. A hit costs about a microsecond, however many options there are.
///
/// Only calls that nobody but Tessera wants to see are found: plain tensors of one device, without a mode, transform,
/// tracer or profiler. Options are told apart by type and value, so that 1, 1.0 and True are three keys: what is right
/// for one says nothing about the others.
class KeptCalls {
 public:
  /// The result of a call that is kept, None for any other.
  nanobind::object call(nanobind::handle q, nanobind::handle k, nanobind::handle v, const nanobind::tuple& options);
  /// `computes`: a TorchRun, or a function of q, k and v. Nothing is kept where call() would not find it.
  void keep(nanobind::handle q, nanobind::handle k, nanobind::handle v, const nanobind::tuple& options,
            nanobind::object computes);
  /// What call() would use, None for a call that is not kept.
  nanobind::object find(nanobind::handle q, nanobind::handle k, nanobind::handle v, const nanobind::tuple& options);
  void clear() noexcept { decltype(calls_)().swap(calls_); }
  /// For Python's collector.
  int visit(visitproc visit, void* arg) const;
  [[nodiscard]] std::size_t size() const noexcept { return calls_.size(); }

 private:
  struct Kept {
    nanobind::object computes;
    const TorchRun* run;  // the same if it is one
  };
  struct Hash {
    std::size_t operator()(const CallKey& key) const noexcept;
  };
  struct Equal {
    bool operator()(const CallKey& a, const CallKey& b) const noexcept;
  };
  const Kept* look(nanobind::handle q, nanobind::handle k, nanobind::handle v, const nanobind::tuple& options);

  std::unordered_map<CallKey, Kept, Hash, Equal> calls_;
};

/// `pairs`: the dispatch keys that a thread without modes includes and excludes, as two integers each.
void set_keys_without_modes(std::vector<std::pair<std::uint64_t, std::uint64_t>> pairs);

void define_kept_calls(nanobind::module_& m);

}  // namespace tessera::python
