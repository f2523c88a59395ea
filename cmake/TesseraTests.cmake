# SPDX-License-Identifier: Apache-2.0
# tests/<folder>/*.cpp (and .c, the C ABI's) becomes one GoogleTest binary test_<folder>; its tests are registered one by one with CTest.

find_package(GTest REQUIRED)
include(GoogleTest)

# tessera_stand_in(<target> <libcuda or libnvrtc> <folder> <sources>): a library under the name that Tessera opens.
function(tessera_stand_in target name folder)
  add_library(${target} SHARED ${ARGN})
  target_include_directories(${target} PRIVATE tests)
  string(REPLACE "." ";" parts ${name})
  list(GET parts 0 output)
  list(GET parts 1 version)
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output} SOVERSION ${version} DEFINE_SYMBOL ""
                        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
  tessera_warnings(${target})
endfunction()

# tests/fakes: launches are written down, sources named.
tessera_stand_in(fake_cuda cuda.1 fakes tests/fakes/cuda.cpp tests/fakes/recorded.cpp)
tessera_stand_in(fake_nvrtc nvrtc.12 fakes tests/fakes/nvrtc.cpp tests/fakes/named_source.cpp)

# tests/emulator: kernels run on the CPU. They are compiled by g++, and fibres are more than sanitizers follow.
find_program(TESSERA_EMULATOR_COMPILER NAMES g++)
mark_as_advanced(TESSERA_EMULATOR_COMPILER)
if(TESSERA_EMULATOR_COMPILER AND CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64"
   AND CMAKE_SIZEOF_VOID_P EQUAL 8 AND NOT TESSERA_SANITIZE)
  file(GLOB sources CONFIGURE_DEPENDS tests/emulator/driver/*.cpp)
  tessera_stand_in(emulated_cuda cuda.1 emulator tests/fakes/cuda.cpp ${sources})
  tessera_stand_in(emulated_nvrtc nvrtc.12 emulator tests/fakes/nvrtc.cpp tests/emulator/compiler/compiler.cpp)
  target_include_directories(emulated_cuda PRIVATE tests/emulator)
  target_include_directories(emulated_nvrtc PRIVATE tests/emulator)
  # Fortified longjmp refuses to leave a stack for another.
  target_compile_options(emulated_cuda PRIVATE -U_FORTIFY_SOURCE)
  target_compile_definitions(emulated_nvrtc PRIVATE TESSERA_EMULATOR_COMPILER="${TESSERA_EMULATOR_COMPILER}"
                             TESSERA_EMULATOR_SOURCES="${PROJECT_SOURCE_DIR}/tests/emulator"
                             TESSERA_EMULATOR_DRIVER="${PROJECT_BINARY_DIR}/emulator/libcuda.so.1")
endif()

file(GLOB TESSERA_TEST_FOLDERS CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/tests tests/*)
list(REMOVE_ITEM TESSERA_TEST_FOLDERS consumer fuzz cases fakes python)
if(NOT TARGET emulated_cuda)
  list(REMOVE_ITEM TESSERA_TEST_FOLDERS emulator)
endif()
foreach(folder IN LISTS TESSERA_TEST_FOLDERS)
  # CTest runs in parallel and begins with what costs most: no long test may be left for the end, alone.
  set(cost 0)
  if(folder STREQUAL ops)
    set(cost 2)
  elseif(folder STREQUAL command)
    set(cost 1)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS tests/${folder}/*.cpp tests/${folder}/*.c)
  if(sources)
    add_executable(test_${folder} ${sources})
    target_include_directories(test_${folder} PRIVATE tools src tests)
    target_link_libraries(test_${folder} PRIVATE tessera ${TESSERA_TOOL_LIBRARIES} GTest::gtest GTest::gtest_main
                          OpenMP::OpenMP_CXX ${CMAKE_DL_LIBS})
    target_compile_definitions(test_${folder} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                               TESSERA_FAKES="${PROJECT_BINARY_DIR}/fakes"
                               TESSERA_EMULATOR="${PROJECT_BINARY_DIR}/emulator")
    add_dependencies(test_${folder} fake_cuda fake_nvrtc)
    if(folder STREQUAL emulator)
      add_dependencies(test_${folder} emulated_cuda emulated_nvrtc)
    endif()
    set_target_properties(test_${folder} PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF LINKER_LANGUAGE CXX)
    tessera_warnings(test_${folder})
    tessera_outer(test_${folder})
    # Those two have tables and helpers of the same names in several files.
    if(NOT folder MATCHES "^(core|files)$")
      tessera_unity(test_${folder})
    endif()
    gtest_discover_tests(test_${folder} TEST_PREFIX ${folder}. DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                         PROPERTIES TIMEOUT 1800 COST ${cost})
  endif()
endforeach()

# The C ABI's example, which holds its outputs against a plain loop.
if(TARGET tessera_c_decode)
  add_test(NAME examples.c_decode COMMAND tessera_c_decode)
endif()
