# SPDX-License-Identifier: Apache-2.0
"""Thresholds of skip states for a wanted error against dense attention (docs/skip-state.md, section 7)."""

from .calibration import Calibration
from .thresholds import SkipThresholds

__all__ = ["Calibration", "SkipThresholds"]
