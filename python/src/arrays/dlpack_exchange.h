// SPDX-License-Identifier: Apache-2.0
// What DLPack adds to a view when Python objects are exchanged (https://dmlc.github.io/dlpack, 1.0 to 1.3): managed
// tensors, which travel in capsules, and the table of C functions that a tensor type may offer. Same layout as there.
#pragma once

#include <cstdint>

#include "base/dlpack.h"

namespace tessera::python {

struct DlVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

/// In a capsule "dltensor".
struct DlManaged {
  DLTensor tensor;
  void* context;
  void (*deleter)(DlManaged* self);
};

/// In a capsule "dltensor_versioned".
struct DlManagedVersioned {
  DlVersion version;
  void* context;
  void (*deleter)(DlManagedVersioned* self);
  std::uint64_t flags;
  DLTensor tensor;
};

inline constexpr std::uint64_t kDlReadOnly = 1U;
inline constexpr std::uint64_t kDlCopied = 2U;

/// In a capsule "dlpack_exchange_api", attribute __dlpack_c_exchange_api__ of a type.
struct DlExchange {
  DlVersion version;
  DlExchange* previous;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  /// Fills a view that the object goes on owning; 0, or −1 with a Python exception. May be nullptr.
  int (*view_of_object)(void* object, DLTensor* out);
  void* current_stream;
};

}  // namespace tessera::python
