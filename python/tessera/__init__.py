# SPDX-License-Identifier: Apache-2.0
"""Attention that computes the tiles it must and skips the rest."""
