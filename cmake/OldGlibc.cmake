# SPDX-License-Identifier: Apache-2.0
# tessera_old_glibc(<target>): a program or module that runs from glibc 2.28 on, built on a newer one (old_glibc.c). The C++
# library is linked in. OpenMP is a shared library and must be old itself; scripts/wheels sees to that.

function(tessera_old_glibc target)
  target_sources(${target} PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/old_glibc.c)
  set_source_files_properties(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/old_glibc.c TARGET_DIRECTORY ${target}
                              PROPERTIES COMPILE_OPTIONS "-fno-builtin;-fno-lto;-O2" SKIP_UNITY_BUILD_INCLUSION ON)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    target_compile_definitions(${target} PRIVATE TESSERA_OLD_GLIBC_PROGRAM)
  endif()
  # The two libraries are empty since 2.34; before, they have the symbols.
  target_link_libraries(${target} PRIVATE -Wl,--no-as-needed -l:libdl.so.2 -l:libpthread.so.0 -Wl,--as-needed)
  target_link_options(${target} PRIVATE -static-libstdc++ -Wl,--exclude-libs,ALL)
endfunction()
