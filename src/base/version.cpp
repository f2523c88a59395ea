// SPDX-License-Identifier: Apache-2.0
#include "tessera/version.h"

namespace tessera {

const char* version() noexcept {
  static_assert(kVersionMajor == 0 && kVersionMinor == 1 && kVersionPatch == 0, "the text below names the version");
  return "0.1.0";
}

}  // namespace tessera
