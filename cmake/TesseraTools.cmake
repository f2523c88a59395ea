# SPDX-License-Identifier: Apache-2.0
# The file readers, the case library and the tessera command. Each exists as soon as its folder holds a source.

find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)

# tessera_tool_library(<name> <folder>): a static library whose headers are included from tools/ and src/.
function(tessera_tool_library name folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
  if(NOT sources)
    return()
  endif()
  add_library(${name} STATIC ${sources})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/tools ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PUBLIC tessera fmt::fmt-header-only nlohmann_json::nlohmann_json
                        PRIVATE OpenMP::OpenMP_CXX)
  tessera_warnings(${name})
  tessera_unity(${name})
endfunction()

tessera_tool_library(tessera_files tools/files)
tessera_tool_library(tessera_cases tools/cases)
if(TARGET tessera_cases AND TARGET tessera_files)
  target_link_libraries(tessera_cases PUBLIC tessera_files)
endif()
set(TESSERA_TOOL_LIBRARIES "")
foreach(library IN ITEMS tessera_cases tessera_files)
  if(TARGET ${library})
    list(APPEND TESSERA_TOOL_LIBRARIES ${library})
  endif()
endforeach()

file(GLOB TESSERA_CLI_SOURCES CONFIGURE_DEPENDS tools/command/*.cpp tools/options/*.cpp tools/bench/*.cpp tools/device/*.cpp)
if(TESSERA_BUILD_TOOLS AND TESSERA_CLI_SOURCES)
  find_package(CLI11 REQUIRED)
  add_executable(tessera_cli ${TESSERA_CLI_SOURCES})
  set_target_properties(tessera_cli PROPERTIES OUTPUT_NAME tessera)
  target_include_directories(tessera_cli PRIVATE tools src)
  target_link_libraries(tessera_cli PRIVATE tessera ${TESSERA_TOOL_LIBRARIES} CLI11::CLI11 fmt::fmt-header-only
                        nlohmann_json::nlohmann_json OpenMP::OpenMP_CXX hwy::hwy)
  tessera_warnings(tessera_cli)
  tessera_outer(tessera_cli)
  tessera_unity(tessera_cli)
  # What measures the machine's peaks would measure an unoptimised loop.
  set_source_files_properties(tools/bench/probe.cpp PROPERTIES COMPILE_OPTIONS -O2 SKIP_UNITY_BUILD_INCLUSION ON)
endif()
