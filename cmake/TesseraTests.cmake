# SPDX-License-Identifier: Apache-2.0
# tests/<folder>/*.cpp (and .c, the C ABI's) becomes one GoogleTest binary test_<folder>; its tests are registered one by one with CTest.

find_package(GTest REQUIRED)
include(GoogleTest)

# tests/fakes: stand-ins for libcuda and NVRTC, under the names that the library opens.
foreach(fake IN ITEMS cuda.1 nvrtc.12)
  string(REPLACE "." ";" parts ${fake})
  list(GET parts 0 name)
  list(GET parts 1 version)
  add_library(fake_${name} SHARED tests/fakes/${name}.cpp)
  target_include_directories(fake_${name} PRIVATE tests)
  set_target_properties(fake_${name} PROPERTIES OUTPUT_NAME ${name} SOVERSION ${version} DEFINE_SYMBOL ""
                        LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fakes)
  tessera_warnings(fake_${name})
endforeach()

file(GLOB TESSERA_TEST_FOLDERS CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/tests tests/*)
list(REMOVE_ITEM TESSERA_TEST_FOLDERS consumer fuzz cases fakes)
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
                               TESSERA_FAKES="${PROJECT_BINARY_DIR}/fakes")
    add_dependencies(test_${folder} fake_cuda fake_nvrtc)
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
