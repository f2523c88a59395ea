// SPDX-License-Identifier: Apache-2.0
// The host side of cuda.combine: the strides of its parameters, with a stand-in for the driver.
#include <gtest/gtest.h>

#include <cstring>

#include "launch/launch.h"
#include "shared/combine.h"

namespace tessera {
namespace {

// The dimension of parts is not the batch's: where there is one part, the sequences still lie apart.
TEST_F(Launch, CombineFindsTheSequencesOfOnePart) {
  const Problem problem = Problem::parse("combine b=2 sq=20 hq=3 d=32 lse parts=1");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  gpu_.parameter_bytes = 0;
  executor.prepare();
  Bindings bindings;
  bindings[Slot::o_parts] = tensor(DType::fp32, {1, 2, 20, 3, 32});
  bindings[Slot::lse_parts] = tensor(DType::fp32, {1, 2, 3, 20});
  bindings[Slot::o] = tensor(DType::fp32, {2, 20, 3, 32});
  bindings[Slot::lse] = tensor(DType::fp32, {2, 3, 20});
  gpu_.parameter_bytes = sizeof(cuda::CombineParams);
  executor.run(bindings);
  cuda::CombineParams params{};
  std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
  EXPECT_EQ(params.o_parts_strides.batch, 20 * 3 * 32);
  EXPECT_EQ(params.o_parts_strides.row, 3 * 32);
  EXPECT_EQ(params.o_parts_strides.head, 32);
  EXPECT_EQ(params.lse_parts_strides.batch, 3 * 20);
  EXPECT_EQ(params.lse_parts_strides.row, 1);
  EXPECT_EQ(params.lse_parts_strides.head, 20);
}

}  // namespace
}  // namespace tessera
