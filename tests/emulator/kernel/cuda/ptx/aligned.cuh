// SPDX-License-Identifier: Apache-2.0
// The emulator's own: a GPU refuses vectors at addresses that are not multiples of their size, a CPU does not.
#pragma once

namespace tessera::cuda::ptx {

template <class T>
T* aligned_16(T* address, Place at) {
  if (reinterpret_cast<unsigned long long>(address) % 16 != 0) emulator::fail("16 bytes at no multiple of 16", at);
  return address;
}

}  // namespace tessera::cuda::ptx
