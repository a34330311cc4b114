"""The parts of `scripts/record_outputs.py`: what they record, and what they mask.

Read `masks` first, then `charts`, `conversation` and `examples`.
"""
