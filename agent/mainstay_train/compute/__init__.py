"""Computes the steps of one stage.

- ``engine``: state, partials and reducer of one cell, and what computes with them
- ``interpreter``: runs the compute part of a step's program
"""
