// SPDX-License-Identifier: Apache-2.0
// What Highway 1.0.3 does not ask the processor for.
#pragma once

namespace tessera::cpu {

enum class X86Feature { avx512_bf16, amx_bf16 };

/// Whether processor and operating system have it; for AMX this asks the system for leave to use tiles, once.
bool x86_has(X86Feature feature);

/// Whether it is one of AMD's.
bool x86_is_amd();

}  // namespace tessera::cpu
