// SPDX-License-Identifier: Apache-2.0
// Targets of the C ABI where there is a GPU: what a caller leaves 0 is the GPU's own.
#include <cstring>
#include <string>

#include "launch/launch.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

/// The plan's account for a target, or the argument that was refused.
std::string explained(const tessera_target& target) {
  tessera_problem* problem = nullptr;
  tessera_plan* plan = nullptr;
  char text[8192] = "";
  tessera_problem_parse("attention b=1 sq=1 sk=65536 hq=8 hkv=1 d=128 dtype=bf16", &problem);
  const int code = tessera_plan_make(problem, &target, nullptr, &plan);
  if (code == TESSERA_OK) tessera_plan_explain(plan, text, sizeof text, nullptr);
  tessera_plan_destroy(plan);
  tessera_problem_destroy(problem);
  return code == TESSERA_OK ? text : tessera_last_error_argument();
}

std::string explained(const Target& target) {
  return make_plan(Problem::parse("attention b=1 sq=1 sk=65536 hq=8 hkv=1 d=128 dtype=bf16"), target).explain();
}

class CTarget : public Launch {
 protected:
  CTarget() {
    target_.struct_size = sizeof target_;
    target_.device_type = TESSERA_CUDA;
  }
  tessera_target target_{};
};

TEST_F(CTarget, ZeroesAreTheDevicesOwn) {
  const std::string own = explained(Target::cuda_device(0));
  EXPECT_NE(own.find("multiprocessors=132"), std::string::npos) << own;
  EXPECT_EQ(explained(target_), own);  // sm too
  target_.sm = 90;
  EXPECT_EQ(explained(target_), own);
  target_.device_index = -1;
  EXPECT_EQ(explained(target_), own);
}

TEST_F(CTarget, AnEmulatedChipHasThePresentMultiprocessors) {
  target_.sm = 80;
  target_.emulated = 1;
  EXPECT_EQ(explained(target_), explained(Target::emulate(80)));
}

TEST_F(CTarget, AnotherChipsAreNotKnownUnlessSaid) {
  target_.sm = 120;
  EXPECT_EQ(explained(target_), explained(Target::cuda(120)));
  target_.multiprocessors = 170;
  target_.shared_memory = 65536;
  Target said = Target::cuda(120);
  said.multiprocessors = 170;
  said.shared_memory = 65536;
  EXPECT_EQ(explained(target_), explained(said));
}

TEST_F(CTarget, DevicesThatThereAreNotAreRefused) {
  for (const int sm : {0, 90}) {
    target_.sm = sm;
    target_.device_index = 1;
    EXPECT_EQ(explained(target_), "device");
    target_.device_index = -2;
    EXPECT_EQ(explained(target_), "target.device_index");
  }
  target_.device_index = 0;
  target_.multiprocessors = -1;
  EXPECT_EQ(explained(target_), "target.multiprocessors");
}

}  // namespace
}  // namespace tessera
