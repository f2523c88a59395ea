# SPDX-License-Identifier: Apache-2.0
# tests/<folder>/*.cpp (and .c, the C ABI's) becomes one GoogleTest binary test_<folder>; its tests are registered one by one with CTest.

find_package(GTest REQUIRED)
include(GoogleTest)

file(GLOB TESSERA_TEST_FOLDERS CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/tests tests/*)
list(REMOVE_ITEM TESSERA_TEST_FOLDERS consumer fuzz cases)
foreach(folder IN LISTS TESSERA_TEST_FOLDERS)
  file(GLOB sources CONFIGURE_DEPENDS tests/${folder}/*.cpp tests/${folder}/*.c)
  if(sources)
    add_executable(test_${folder} ${sources})
    target_include_directories(test_${folder} PRIVATE tools src tests)
    target_link_libraries(test_${folder} PRIVATE tessera ${TESSERA_TOOL_LIBRARIES} GTest::gtest GTest::gtest_main
                          OpenMP::OpenMP_CXX ${CMAKE_DL_LIBS})
    target_compile_definitions(test_${folder} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    set_target_properties(test_${folder} PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF LINKER_LANGUAGE CXX)
    tessera_warnings(test_${folder})
    gtest_discover_tests(test_${folder} TEST_PREFIX ${folder}. DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                         PROPERTIES TIMEOUT 600)
  endif()
endforeach()
