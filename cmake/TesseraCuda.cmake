# SPDX-License-Identifier: Apache-2.0
# What the library carries for GPUs: the text of its device headers and, if given, a pack of compiled kernels. Neither the
# CUDA toolkit nor its headers are needed.

set(TESSERA_CUDA_PACK "" CACHE FILEPATH "Pack of compiled kernels to embed, as `tessera compile --pack` writes it")

file(GLOB_RECURSE TESSERA_DEVICE_HEADERS CONFIGURE_DEPENDS src/shared/*.h src/cuda/*.cuh)
set(TESSERA_EMBEDDED_HEADERS ${PROJECT_BINARY_DIR}/generated/device_headers.cpp)
add_custom_command(OUTPUT ${TESSERA_EMBEDDED_HEADERS}
                   COMMAND ${CMAKE_COMMAND} -D FOLDER=${PROJECT_SOURCE_DIR}/src -D OUTPUT=${TESSERA_EMBEDDED_HEADERS}
                           -P ${PROJECT_SOURCE_DIR}/cmake/embed_headers.cmake
                   DEPENDS ${TESSERA_DEVICE_HEADERS} ${PROJECT_SOURCE_DIR}/cmake/embed_headers.cmake
                   COMMENT "Embedding the device headers" VERBATIM)
target_sources(tessera PRIVATE ${TESSERA_EMBEDDED_HEADERS})

if(TESSERA_CUDA_PACK)
  # An assembler's .incbin: a C++ array of tens of megabytes would take minutes to compile.
  enable_language(ASM)
  set(TESSERA_EMBEDDED_PACK ${PROJECT_BINARY_DIR}/generated/kernel_pack.S)
  configure_file(cmake/kernel_pack.S.in ${TESSERA_EMBEDDED_PACK} @ONLY)
  set_property(SOURCE ${TESSERA_EMBEDDED_PACK} APPEND PROPERTY OBJECT_DEPENDS ${TESSERA_CUDA_PACK})
  target_sources(tessera PRIVATE ${TESSERA_EMBEDDED_PACK})
  target_compile_definitions(tessera PRIVATE TESSERA_EMBEDDED_PACK)
endif()
