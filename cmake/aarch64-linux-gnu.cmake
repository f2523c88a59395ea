# SPDX-License-Identifier: Apache-2.0
# Toolchain: AArch64 Linux by Debian's cross compiler, what is built run by qemu-user. TESSERA_ARM_LIBRARIES names the folder
# into which the arm64 packages of the libraries are unpacked (`scripts/setup arm`: build/arm/libraries).

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

set(TESSERA_ARM_LIBRARIES "" CACHE PATH "Folder of unpacked arm64 packages")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_ARM_LIBRARIES)
list(APPEND CMAKE_FIND_ROOT_PATH ${TESSERA_ARM_LIBRARIES})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# Also the folders of the compiler itself: libgomp is there.
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY BOTH)
