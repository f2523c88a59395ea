// SPDX-License-Identifier: Apache-2.0
// Kernels of a pack under a driver, which is for CUDA 12.9 here.
#include "cuda/jit/pack.h"

#include <gtest/gtest.h>

#include "cuda/jit/cache.h"
#include "cuda/jit/disk_cache.h"
#include "fakes/folder.h"
#include "launch/launch.h"

namespace tessera {
namespace {

class PackUnderADriver : public Launch {
 protected:
  void TearDown() override {
    cuda::set_kernel_pack("none");
    Launch::TearDown();
  }

  cuda::Origin origin_of_code_by(const std::string& compiler) {
    const cuda::KernelSource source{"a kernel", "text of " + compiler};
    cuda::Compiled compiled;
    compiled.cubin.assign(100, 'x');
    compiled.compiler = compiler;
    cuda::PackWriter writer;
    writer.add(cuda::kernel_key(source, "sm_90a"), source.name, "sm_90a", compiled);
    const std::string path = packs_.path() + "/" + compiler;
    cuda::replace_file(path, writer.bytes());
    cuda::set_kernel_pack(path);
    return cuda::find_or_compile(source, "sm_90a").origin;
  }

  testing::Folder packs_;
};

TEST_F(PackUnderADriver, CodeOfANewerMajorVersionIsCompiledInstead) {
  EXPECT_EQ(origin_of_code_by("12.8"), cuda::Origin::pack);
  EXPECT_EQ(origin_of_code_by("12.99"), cuda::Origin::pack);
  EXPECT_EQ(origin_of_code_by("13.0"), cuda::Origin::compiler);
}

}  // namespace
}  // namespace tessera
