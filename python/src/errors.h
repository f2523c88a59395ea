// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::python {

/// tessera::Error becomes ValueError, NotImplementedError, OSError or RuntimeError with the same text.
void register_errors();

}  // namespace tessera::python
