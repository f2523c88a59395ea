// SPDX-License-Identifier: Apache-2.0
// What tests see and set of the stand-in driver (cuda.cpp): one GPU of compute capability 9.0, or two, whose memory is
// the host's and whose launches are written down instead of run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

struct FakeLaunch {
  std::array<std::uint32_t, 3> grid{};
  std::array<std::uint32_t, 3> block{};
  std::uint32_t shared_bytes = 0;
  void* stream = nullptr;
  void* function = nullptr;
  std::uint32_t attributes = 0;
  std::array<char, 4096> parameters{};  // bytes of the first kernel parameter, as far as the test reads them
};

struct FakeMap {
  std::array<std::uint64_t, 5> sizes{};
  std::array<std::uint32_t, 5> box{};
};

struct FakeCuda {
  int devices = 1;  // 1 or 2
  int launches = 0;
  FakeLaunch last;
  std::size_t parameter_bytes = 0;    // to be kept of the first parameter; set by the test
  int modules = 0;                    // loaded so far
  int allocations = 0;                // of device memory, not freed yet
  int capture = 0;                    // what cuStreamIsCapturing answers
  int capture_result = 0;             // what it returns
  unsigned long long streams = 0;     // destroyed so far: their handles are other streams now
  int stream_id_result = 0;           // what cuStreamGetId returns
  int launch_result = 0;              // what cuLaunchKernelEx answers
  int module_result = 0;              // what cuModuleLoadData answers
  unsigned long long context_id = 1;  // of the primary context
  int synchronisations = 0;           // of streams
  std::size_t map_count = 0;          // tensor maps encoded so far
  std::array<FakeMap, 8> maps{};      // the first of them
};

extern "C" FakeCuda* fake_cuda();
