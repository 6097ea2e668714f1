"""The figure of studies/text.yaml, drawn as guidance.py does: retrieval against the scale ω, and FLOPs a sample."""

from __future__ import annotations

from studies import guidance

columns, draw = guidance.columns, guidance.draw
