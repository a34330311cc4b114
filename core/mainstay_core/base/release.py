"""The version of this Mainstay, as metrics show it."""

from __future__ import annotations

VERSION = "0.1.0"
"""Also in pyproject.toml and Chart.yaml: an image has the packages without their metadata."""
