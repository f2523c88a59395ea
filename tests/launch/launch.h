// SPDX-License-Identifier: Apache-2.0
// What tests of the host side of kernels share: stand-ins take the places of the driver and of NVRTC.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "cuda/driver/device.h"
#include "cuda/jit/cache.h"
#include "cuda/jit/kernel.h"
#include "fakes/fakes.h"
#include "fakes/folder.h"
#include "shared/params.h"
#include "tessera/cuda.h"
#include "tessera/executor.h"

namespace tessera {

/// Tensors in "device memory", which the stand-in takes from the host's.
class Launch : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda::set_nvrtc(testing::fake_nvrtc_path());
    cuda::set_cache_folder(folder_.path());
    cuda::forget_compiled();
    gpu_.context_id += 1;  // as if the context were new: nothing is loaded into it
    gpu_.launch_result = gpu_.module_result = gpu_.capture = 0;
    gpu_.parameter_bytes = sizeof(cuda::FwdParams);
    gpu_.launches = gpu_.modules = 0;
  }
  void TearDown() override {
    cuda::set_nvrtc("");
    cuda::set_cache_folder("");
    for (void* memory : memory_) cuda::release(0, memory);
    gpu_.capture = 0;
  }

  Tensor tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor tensor = Tensor::contiguous(nullptr, dtype, shape, {DeviceType::cuda, 0});
    tensor.data = cuda::allocate(0, static_cast<std::size_t>(tensor.numel()) * size_of(dtype));
    memory_.push_back(tensor.data);
    return tensor;
  }

  Bindings dense(const Problem& p) {
    Bindings bindings;
    bindings[Slot::q] = tensor(p.q_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_qk});
    bindings[Slot::k] = tensor(p.k_type, {p.batch, p.kv.seqlen, p.heads_kv, p.head_dim_qk});
    bindings[Slot::v] = tensor(p.v_type, {p.batch, p.kv.seqlen, p.heads_kv, p.head_dim_v});
    bindings[Slot::o] = tensor(p.o_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
    if (p.lse) bindings[Slot::lse] = tensor(DType::fp32, {p.batch, p.heads_q, p.seqlen_q});
    return bindings;
  }

  static inline FakeCuda& gpu_ = testing::use_fake_cuda();
  testing::Folder folder_;
  std::vector<void*> memory_;
  Problem problem_ = Problem::parse("attention b=2 sq=300 hq=4 hkv=2 d=64 dtype=bf16 causal");
};

}  // namespace tessera
