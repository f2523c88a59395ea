# SPDX-License-Identifier: Apache-2.0
# Headers, library, command, CMake package and pkg-config file.

include(CMakePackageConfigHelpers)
set(TESSERA_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

install(TARGETS tessera EXPORT tessera-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET tessera_cli)
  install(TARGETS tessera_cli)
endif()
install(EXPORT tessera-targets NAMESPACE tessera:: DESTINATION ${TESSERA_CMAKE_DIR})

configure_package_config_file(cmake/tessera-config.cmake.in ${PROJECT_BINARY_DIR}/tessera-config.cmake
                              INSTALL_DESTINATION ${TESSERA_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tessera-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tessera-config.cmake ${PROJECT_BINARY_DIR}/tessera-config-version.cmake
        DESTINATION ${TESSERA_CMAKE_DIR})

# A static library needs what it was built on at the consumer's link, so a plain `pkg-config --libs` names it too.
set(TESSERA_PC_PRIVATE "-lhwy")
foreach(name IN LISTS OpenMP_CXX_LIB_NAMES)
  string(APPEND TESSERA_PC_PRIVATE " -l${name}")
endforeach()
string(APPEND TESSERA_PC_PRIVATE " -lstdc++ -lm")
if(BUILD_SHARED_LIBS)
  set(TESSERA_PC_LIBS "")
else()
  set(TESSERA_PC_LIBS " ${TESSERA_PC_PRIVATE}")
  set(TESSERA_PC_PRIVATE "")
endif()
# Relative to the file itself, so that an installed tree can be moved.
file(RELATIVE_PATH TESSERA_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/tessera.pc.in ${PROJECT_BINARY_DIR}/tessera.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(TESSERA_INSTALL_PACK "" CACHE FILEPATH "Pack of compiled kernels to install, as `tessera compile --pack` writes it")
if(TESSERA_INSTALL_PACK)
  install(FILES "${TESSERA_INSTALL_PACK}" DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera RENAME tessera.pack)
endif()

# `cpack -G DEB` in the build folder, for the Debian that it was built on.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR Tessera)
set(CPACK_PACKAGE_CONTACT "Tessera's maintainers <noreply@tessera.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# What a static library's consumers link, and a compiler for them.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libhwy-dev, g++")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "nvidia-driver")
include(CPack)
