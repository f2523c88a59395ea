// SPDX-License-Identifier: Apache-2.0
// Linked into what a wheel holds, so that it runs from glibc 2.28 on although it was built on a newer one. Functions
// that glibc has in a newer version than 2.28 are defined here, hidden, and go on to the oldest version of the same
// name, which every glibc keeps; those that 2.28 has not at all are made of what it has. auditwheel checks that none is
// left. Declarations are spelled out: the headers' would name the newer versions.
#include <stddef.h>

#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#define CONDITIONS "GLIBC_2.3.2"
#define LINK_MAPS "GLIBC_2.3.3"
enum { kStatVersion = 1, kSysGettid = 186 };
#elif defined(__aarch64__)
#define BASE "GLIBC_2.17"
#define CONDITIONS "GLIBC_2.17"
#define LINK_MAPS "GLIBC_2.17"
enum { kStatVersion = 0, kSysGettid = 178 };
#else
#error "old_glibc.c knows x86-64 and AArch64 only"
#endif

#define HIDDEN __attribute__((visibility("hidden")))

/// RESULT NAME(PARAMETERS) hands on to its oldest version.
#define OLD(version, result, name, parameters, arguments) \
  result old_##name parameters;                           \
  __asm__(".symver old_" #name ", " #name "@" version);   \
  HIDDEN result name parameters { return old_##name arguments; }

struct timespec_ {
  long seconds, nanoseconds;
};

// dlopen, threads and locks moved from libraries of their own into libc with 2.34.
OLD(BASE, void*, dlopen, (const char* file, int mode), (file, mode))
OLD(BASE, void*, dlsym, (void* library, const char* name), (library, name))
OLD(BASE, int, dlclose, (void* library), (library))
OLD(BASE, char*, dlerror, (void), ())
OLD(BASE, int, dladdr, (const void* address, void* info), (address, info))
OLD(LINK_MAPS, int, dladdr1, (const void* address, void* info, void** extra, int flags), (address, info, extra, flags))
OLD(BASE, int, pthread_create, (unsigned long* thread, const void* how, void* (*run)(void*), void* value),
    (thread, how, run, value))
OLD(BASE, int, pthread_join, (unsigned long thread, void** value), (thread, value))
OLD(BASE, int, pthread_detach, (unsigned long thread), (thread))
OLD(BASE, int, pthread_once, (int* once, void (*run)(void)), (once, run))
OLD(BASE, int, pthread_key_create, (unsigned* key, void (*destroy)(void*)), (key, destroy))
OLD(BASE, int, pthread_key_delete, (unsigned key), (key))
OLD(BASE, void*, pthread_getspecific, (unsigned key), (key))
OLD(BASE, int, pthread_setspecific, (unsigned key, const void* value), (key, value))
OLD(BASE, int, pthread_rwlock_rdlock, (void* lock), (lock))
OLD(BASE, int, pthread_rwlock_wrlock, (void* lock), (lock))
OLD(BASE, int, pthread_rwlock_unlock, (void* lock), (lock))

// Since 2.29 without the error handling of System V; the values are the same.
OLD(BASE, double, exp, (double x), (x))
OLD(BASE, double, exp2, (double x), (x))
OLD(BASE, double, log, (double x), (x))
OLD(BASE, double, log2, (double x), (x))
OLD(BASE, double, pow, (double x, double y), (x, y))

// Functions since 2.33; before, the headers called these.
int __xstat(int version, const char* path, void* facts);
int __lxstat(int version, const char* path, void* facts);
int __fxstat(int version, int file, void* facts);
__asm__(".symver __xstat, __xstat@" BASE);
__asm__(".symver __lxstat, __lxstat@" BASE);
__asm__(".symver __fxstat, __fxstat@" BASE);
HIDDEN int stat(const char* path, void* facts) { return __xstat(kStatVersion, path, facts); }
HIDDEN int stat64(const char* path, void* facts) { return __xstat(kStatVersion, path, facts); }
HIDDEN int lstat(const char* path, void* facts) { return __lxstat(kStatVersion, path, facts); }
HIDDEN int lstat64(const char* path, void* facts) { return __lxstat(kStatVersion, path, facts); }
HIDDEN int fstat(int file, void* facts) { return __fxstat(kStatVersion, file, facts); }
HIDDEN int fstat64(int file, void* facts) { return __fxstat(kStatVersion, file, facts); }

long syscall(long number, ...);
HIDDEN int gettid(void) { return (int)syscall(kSysGettid); }  // since 2.30

// Since 2.32: whether a process has one thread only. 0 is always right, and costs an atomic addition.
HIDDEN char __libc_single_threaded = 0;

// Since 2.30: a wait until a time of a given clock. Conditions of 2.28 wait by the clock of the day.
int clock_gettime(int clock, struct timespec_* now);
int old_pthread_cond_timedwait(void* condition, void* mutex, const struct timespec_* until);
__asm__(".symver old_pthread_cond_timedwait, pthread_cond_timedwait@" CONDITIONS);
HIDDEN int pthread_cond_clockwait(void* condition, void* mutex, int clock, const struct timespec_* until) {
  struct timespec_ of_clock, of_day;
  if (clock_gettime(clock, &of_clock) != 0 || clock_gettime(0, &of_day) != 0) return 22;  // EINVAL
  of_day.seconds += until->seconds - of_clock.seconds;
  of_day.nanoseconds += until->nanoseconds - of_clock.nanoseconds;
  while (of_day.nanoseconds < 0) of_day.nanoseconds += 1000000000, of_day.seconds -= 1;
  while (of_day.nanoseconds >= 1000000000) of_day.nanoseconds -= 1000000000, of_day.seconds += 1;
  return old_pthread_cond_timedwait(condition, mutex, &of_day);
}

// Since 2.36; std::random_device asks for it.
long getrandom(void* out, size_t bytes, unsigned flags);
void abort(void);
HIDDEN unsigned arc4random(void) {
  unsigned value = 0;
  if (getrandom(&value, sizeof(value), 0) != (long)sizeof(value)) abort();
  return value;
}

#ifdef TESSERA_OLD_GLIBC_PROGRAM
// Before 2.34 a program itself ran what its constructors are; the newer one does so if it is given nothing to run.
typedef void (*Constructor)(int, char**, char**);
extern Constructor __preinit_array_start[] HIDDEN;
extern Constructor __preinit_array_end[] HIDDEN;
extern Constructor __init_array_start[] HIDDEN;
extern Constructor __init_array_end[] HIDDEN;
void _init(void);
static void construct(int count, char** arguments, char** environment) {
  for (Constructor* at = __preinit_array_start; at != __preinit_array_end; ++at) (*at)(count, arguments, environment);
  _init();
  for (Constructor* at = __init_array_start; at != __init_array_end; ++at) (*at)(count, arguments, environment);
}
int old___libc_start_main(int (*run)(int, char**, char**), int count, char** arguments, Constructor construct_all,
                          void (*destruct)(void), void (*unload)(void), void* stack);
__asm__(".symver old___libc_start_main, __libc_start_main@" BASE);
HIDDEN int __libc_start_main(int (*run)(int, char**, char**), int count, char** arguments, Constructor construct_all,
                             void (*destruct)(void), void (*unload)(void), void* stack) {
  (void)construct_all;
  return old___libc_start_main(run, count, arguments, construct, destruct, unload, stack);
}
#endif
