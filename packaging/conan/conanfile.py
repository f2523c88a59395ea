# SPDX-License-Identifier: Apache-2.0
"""Conan 2 recipe of the C++ library. From the folder of the clone: conan create packaging/conan --build=missing."""

import os
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class TesseraRecipe(ConanFile):
    name = "tessera"
    description = "Attention that computes the tiles it must and skips the rest"
    license = "Apache-2.0"
    topics = ("attention", "transformer", "cuda", "simd")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False]}  # noqa: RUF012
    default_options = {"shared": False}  # noqa: RUF012

    def _sources(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._sources(), "include", "tessera", "version.h"))
        self.version = ".".join(re.search(rf"kVersion{part} = (\d+)", text)[1] for part in ("Major", "Minor", "Patch"))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, self._sources(), self.export_sources_folder)

    def requirements(self):
        self.requires("highway/[>=1.0.3 <2]")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("TOOLS", "TESTS", "EXAMPLES"):
            toolchain.cache_variables[f"TESSERA_BUILD_{part}"] = False
        toolchain.generate()
        dependencies = CMakeDeps(self)
        dependencies.set_property("highway", "cmake_file_name", "hwy")
        dependencies.set_property("highway::hwy", "cmake_target_name", "hwy::hwy")
        dependencies.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.export_sources_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        # The package's own CMake files serve find_package(tessera); they find OpenMP and Highway themselves.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append(os.path.join("lib", "cmake", "tessera"))
        self.cpp_info.libs = ["tessera"]
        if self.settings.os == "Linux":
            self.cpp_info.system_libs = ["dl", "m", "pthread", "gomp"]
