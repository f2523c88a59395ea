// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cuda::ptx {

/// Kernels run one after another.
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch() {}
inline void griddepcontrol_wait_and_launch() {}

}  // namespace tessera::cuda::ptx
