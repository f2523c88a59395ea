# SPDX-License-Identifier: Apache-2.0
# tests/fuzz/<name>.cpp becomes the libFuzzer program fuzz_<name>.

file(GLOB TESSERA_FUZZ_SOURCES CONFIGURE_DEPENDS tests/fuzz/*.cpp)
foreach(source IN LISTS TESSERA_FUZZ_SOURCES)
  cmake_path(GET source STEM name)
  add_executable(fuzz_${name} ${source})
  target_include_directories(fuzz_${name} PRIVATE tools src)
  target_link_libraries(fuzz_${name} PRIVATE tessera tessera_files)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  tessera_warnings(fuzz_${name})
endforeach()
