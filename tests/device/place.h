// SPDX-License-Identifier: Apache-2.0
// Where the tests of this folder run: on the CPU, which checks the test's own logic everywhere, on the GPU, and on the
// GPU under the plans of other chips. What a machine lacks is skipped.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "cases/compare.h"
#include "cases/device_copy.h"
#include "cases/inputs/inputs.h"
#include "cpu/reference/reference.h"
#include "cuda/driver/device.h"
#include "cuda/driver/driver.h"
#include "tessera/executor.h"

namespace tessera::test {

/// `place`: "cpu", "gpu", or "sm80", … for that chip's plans. Throws Error{unsupported} where there is none.
inline Target target_of(const std::string& place) {
  if (place == "cpu") return Target::cpu(1);
  if (place == "gpu") return Target::cuda_device(0);
  return Target::emulate(std::atoi(place.c_str() + 2), 0);
}

inline bool is_on_gpu(const Target& target) { return target.device == DeviceType::cuda; }

/// A test of one place.
class OnPlace : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string place = GetParam();
    if (place != "cpu" && (cuda::find_driver() == nullptr || cuda::devices().empty())) GTEST_SKIP() << "no GPU";
    try {
      target_ = target_of(place);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) throw;
      GTEST_SKIP() << error.what();
    }
  }
  Target target_;
};

/// The places of INSTANTIATE_TEST_SUITE_P(Places, Suite, every_place(), name_of_place).
inline auto every_place() { return ::testing::Values("cpu", "gpu", "sm80", "sm89", "sm120"); }
inline auto every_gpu() { return ::testing::Values("gpu", "sm80", "sm89", "sm120"); }
inline std::string name_of_place(const ::testing::TestParamInfo<const char*>& place) { return place.param; }

/// With TESSERA_TEST_APART set an allocation for each tensor, which a memory checker can judge.
inline cases::Placement placement() {
  return std::getenv("TESSERA_TEST_APART") != nullptr ? cases::Placement::apart : cases::Placement::together;
}

/// A plan that is ready to run on the memory of `inputs`: their own on the CPU, a copy on a GPU.
class PlacedRun {
 public:
  PlacedRun(cases::Inputs& inputs, const Plan& plan)
      : on_gpu_(is_on_gpu(plan.target())),
        host_workspace_(on_gpu_ ? 0 : plan.workspace_bytes()),
        copy_(on_gpu_ ? std::make_unique<cases::DeviceCopy>(inputs, plan.workspace_bytes(), plan.target().index,
                                                            placement())
                      : nullptr),
        bindings_(on_gpu_ ? copy_->bindings() : inputs.bindings()),
        executor_(plan, on_gpu_ ? copy_->workspace() : host_workspace_.data(), plan.workspace_bytes()) {}

  /// Tensors of another run may take the places of this run's own.
  [[nodiscard]] Bindings& bindings() { return bindings_; }
  [[nodiscard]] Executor& executor() { return executor_; }
  [[nodiscard]] Stream stream() const { return on_gpu_ ? cases::device_stream(bindings_device()) : Stream{}; }

  void upload() {
    if (on_gpu_) {
      copy_->upload();
    } else {
      std::memset(host_workspace_.data(), 0xFF, host_workspace_.size());
    }
  }
  void start() { executor_.run(bindings_, stream()); }
  void wait() {
    if (on_gpu_) cases::wait_for(stream());
  }
  /// "" or what was written outside the tensors' buffers.
  std::string download() { return on_gpu_ ? copy_->download() : ""; }

  std::string run() {
    upload();
    start();
    wait();
    return download();
  }

 private:
  [[nodiscard]] int bindings_device() const { return executor_.plan().target().index; }

  bool on_gpu_;
  cases::PoisonedMemory host_workspace_;
  std::unique_ptr<cases::DeviceCopy> copy_;
  Bindings bindings_;
  Executor executor_;
};

/// Runs of plain that a later judgement can no longer make, because the run that it judges overwrites what it reads:
/// those of linear attention, whose states are updated in place.
inline std::vector<reference::Result> plain_before(const Problem& problem, const Bindings& bindings) {
  std::vector<reference::Result> plain;
  const std::uint32_t runs = problem.is_linear() && problem.pass == Pass::forward ? 16 : 0;
  while (plain.size() < runs) {
    const auto order = static_cast<std::uint32_t>(plain.size());
    plain.push_back(reference::compute(problem, bindings, reference::Arithmetic::plain, order));
  }
  return plain;
}

/// "" or how `got` breaks the rule of docs/testing.md. `plain`: of plain_before.
inline std::string judge(const Problem& problem, const Bindings& got, const reference::Result& oracle,
                         std::vector<reference::Result> plain = {}) {
  for (std::size_t enough = 1;; enough = std::min<std::size_t>(cases::kPlainRuns, enough * 8)) {
    while (plain.size() < enough) {
      const auto order = static_cast<std::uint32_t>(plain.size());
      plain.push_back(reference::compute(problem, got, reference::Arithmetic::plain, order));
    }
    const cases::Comparison comparison = cases::compare(problem, got, oracle, plain);
    if (comparison.passed) return "";
    if (!cases::rounding_may_explain(comparison.worst_ratio, plain.size())) return comparison.failure;
  }
}

}  // namespace tessera::test
