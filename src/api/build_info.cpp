// SPDX-License-Identifier: Apache-2.0
// What this build was made with, and the instruction sets that it has and this machine can run.
#include "tessera/plan.h"
#include "tessera/version.h"

#if __has_include(<hwy/highway.h>)
#include <hwy/highway.h>
#endif

#ifndef TESSERA_BUILD_TYPE
#define TESSERA_BUILD_TYPE "unknown"
#endif

namespace tessera {

std::string build_info() {
  std::string text = "version: ";
  text += version();
#if defined(__clang__)
  text += "\ncompiler: clang " __clang_version__;
#elif defined(__GNUC__)
  text += "\ncompiler: g++ " __VERSION__;
#else
  text += "\ncompiler: unknown";
#endif
  text += "\nbuild type: " TESSERA_BUILD_TYPE;
  text += "\ninstruction sets:";
  for (const std::string& isa : cpu_isas()) text += " " + isa;
#if defined(_OPENMP)
  text += "\nOpenMP: " + std::to_string(_OPENMP);
#else
  text += "\nOpenMP: none";
#endif
#if defined(HWY_MAJOR)
  text += "\nHighway: " + std::to_string(HWY_MAJOR) + "." + std::to_string(HWY_MINOR) + "." + std::to_string(HWY_PATCH);
#else
  text += "\nHighway: none";
#endif
  return text + "\n";
}

}  // namespace tessera
