# SPDX-License-Identifier: Apache-2.0
# examples/<name>/*.cpp becomes the program tessera_<name>, and so does *.c, which knows nothing but the C ABI.

file(GLOB TESSERA_EXAMPLES CONFIGURE_DEPENDS LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/examples examples/*)
foreach(example IN LISTS TESSERA_EXAMPLES)
  file(GLOB sources CONFIGURE_DEPENDS examples/${example}/*.cpp)
  file(GLOB c_sources CONFIGURE_DEPENDS examples/${example}/*.c)
  if(sources)
    add_executable(tessera_${example} ${sources})
    target_include_directories(tessera_${example} PRIVATE tools src)
    target_link_libraries(tessera_${example} PRIVATE tessera ${TESSERA_TOOL_LIBRARIES} fmt::fmt-header-only
                          nlohmann_json::nlohmann_json OpenMP::OpenMP_CXX)
  elseif(c_sources)
    add_executable(tessera_${example} ${c_sources})
    target_link_libraries(tessera_${example} PRIVATE tessera m)
    set_target_properties(tessera_${example} PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF LINKER_LANGUAGE CXX)
  endif()
  if(TARGET tessera_${example})
    target_compile_definitions(tessera_${example} PRIVATE TESSERA_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    tessera_warnings(tessera_${example})
  endif()
endforeach()
