# SPDX-License-Identifier: Apache-2.0
# examples/<name>/*.cpp becomes the program tessera_<name>.

file(GLOB TESSERA_EXAMPLES CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/examples examples/*)
foreach(example IN LISTS TESSERA_EXAMPLES)
  file(GLOB sources CONFIGURE_DEPENDS examples/${example}/*.cpp)
  if(sources)
    add_executable(tessera_${example} ${sources})
    target_include_directories(tessera_${example} PRIVATE tools src)
    target_link_libraries(tessera_${example} PRIVATE tessera ${TESSERA_TOOL_LIBRARIES} fmt::fmt-header-only
                          nlohmann_json::nlohmann_json OpenMP::OpenMP_CXX)
    target_compile_definitions(tessera_${example} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    tessera_warnings(tessera_${example})
  endif()
endforeach()
