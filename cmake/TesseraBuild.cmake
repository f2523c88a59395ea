# SPDX-License-Identifier: Apache-2.0
# Language level, build type, warnings, sanitizers and coverage: what every target of this project shares.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(PROJECT_IS_TOP_LEVEL)
  get_property(TESSERA_MULTI_CONFIG GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(NOT CMAKE_BUILD_TYPE AND NOT TESSERA_MULTI_CONFIG)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
  endif()
  # -O2: the hot loops are explicit SIMD; -O3 only makes them longer to compile.
  set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
  find_program(TESSERA_CCACHE ccache)
  mark_as_advanced(TESSERA_CCACHE)
  if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_C_COMPILER_LAUNCHER ${TESSERA_CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE})
  endif()
endif()

if(TESSERA_SANITIZE)
  if(NOT TESSERA_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
    message(FATAL_ERROR "TESSERA_SANITIZE is '${TESSERA_SANITIZE}'; want address, undefined, address,undefined or thread")
  endif()
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
endif()

if(TESSERA_BUILD_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "TESSERA_BUILD_FUZZ needs clang; the compiler is ${CMAKE_CXX_COMPILER_ID}")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

if(TESSERA_COVERAGE)
  add_compile_options(--coverage -fprofile-update=atomic)
  add_link_options(--coverage)
endif()

# For what stands around the library, the command and the tests: little of the run is spent in it, and it compiles in half
# the time, unoptimised under AddressSanitizer and a little optimised in a release.
function(tessera_outer target)
  if(TESSERA_SANITIZE MATCHES "address")
    target_compile_options(${target} PRIVATE -O0)
  else()
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
endfunction()

# Under sanitizers nearly all of the time of these goes into headers that their sources share. Other builds keep a command
# line for each source, which clang-tidy and an edit of one file want.
function(tessera_unity target)
  if(TESSERA_SANITIZE)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
endfunction()

function(tessera_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow $<$<BOOL:${TESSERA_WERROR}>:-Werror>)
endfunction()
