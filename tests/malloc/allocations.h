// SPDX-License-Identifier: Apache-2.0
// Counts allocations: a binary whose one source includes this interposes the allocator of the C library, in every
// thread.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESSERA_OWN_ALLOCATOR 0  // the sanitizer interposes it itself
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define TESSERA_OWN_ALLOCATOR 0
#endif
#endif
#ifndef TESSERA_OWN_ALLOCATOR
#define TESSERA_OWN_ALLOCATOR 1
#endif

namespace {
std::atomic<bool> counting{false};
std::atomic<long> allocations{0};
void count() noexcept {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

#if TESSERA_OWN_ALLOCATOR
// glibc's own entry points, which the interposed ones fall back to.
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);

void* malloc(std::size_t size) {
  count();
  return __libc_malloc(size);
}
void* calloc(std::size_t number, std::size_t size) {
  count();
  return __libc_calloc(number, size);
}
void* realloc(void* memory, std::size_t size) {
  count();
  return __libc_realloc(memory, size);
}
void* memalign(std::size_t alignment, std::size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  count();
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
}
#endif

namespace tessera {

/// Allocations of the whole process meanwhile.
template <class Run>
long allocations_of(Run&& run) {
  allocations = 0;
  counting = true;
  run();
  counting = false;
  return allocations;
}

}  // namespace tessera
