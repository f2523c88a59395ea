# SPDX-License-Identifier: Apache-2.0
"""Operands of 8 bits (docs/quantization.md)."""
