# SPDX-License-Identifier: Apache-2.0
# The two commands, for those who type make. The build itself is CMake's.
.PHONY: demo test
demo:
	@bash scripts/demo
test:
	@bash scripts/test
