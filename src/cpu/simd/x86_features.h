// SPDX-License-Identifier: Apache-2.0
// Processor features that Highway 1.0.3 does not detect.
#pragma once

namespace tessera::cpu {

enum class X86Feature { avx512_bf16, amx_bf16 };

/// Whether processor and operating system support it. For AMX this also asks the system for permission to use tiles.
bool x86_has(X86Feature feature);

/// Whether the processor is one of AMD's.
bool x86_is_amd();

}  // namespace tessera::cpu
