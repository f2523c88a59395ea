# SPDX-License-Identifier: Apache-2.0
# tests/fuzz/<name>.cpp becomes the libFuzzer program fuzz_<name>.

# The kernels are linked and never run; instrumented they would take half of the build.
file(GLOB TESSERA_KERNEL_SOURCES CONFIGURE_DEPENDS src/cpu/simd/*.cpp)
set_source_files_properties(${TESSERA_KERNEL_SOURCES} PROPERTIES COMPILE_OPTIONS
                            "-O0;-fno-sanitize=all;-fno-profile-instr-generate;-fno-coverage-mapping")

file(GLOB TESSERA_FUZZ_SOURCES CONFIGURE_DEPENDS tests/fuzz/*.cpp)
foreach(source IN LISTS TESSERA_FUZZ_SOURCES)
  cmake_path(GET source STEM name)
  add_executable(fuzz_${name} ${source})
  target_include_directories(fuzz_${name} PRIVATE tools src)
  target_link_libraries(fuzz_${name} PRIVATE tessera tessera_files)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  tessera_warnings(fuzz_${name})
endforeach()
