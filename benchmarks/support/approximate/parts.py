"""Lists the parts of the report on stages that are made anew: title, and what makes each."""

from __future__ import annotations

from collections.abc import Callable

from support.approximate.experiment import Experiment
from support.approximate.methods import figure_3, figure_4a, figure_4b, figure_5b, table_2, table_3
from support.approximate.stage_losses import check, figure_2, jumps

PARTS: dict[str, tuple[str, Callable[[Experiment], list[str]]]] = {
    "check": ("Can this setting tell?", check),
    "jumps": ("Right after a loss: strategies on the same states", jumps),
    "figure2": ("Figure 2: strategies for an inner stage", figure_2),
    "table2": ("Table 2: four methods", table_2),
    "figure3": ("Figure 3: four methods by steps, and what ends cost", figure_3),
    "figure4a": ("Figure 4a: CheckFree+ at three rates", figure_4a),
    "figure4b": ("Figure 4b: how often checkpoints are made", figure_4b),
    "figure5b": ("Figure 5b: swapped without losses", figure_5b),
    "table3": ("Table 3: perplexity on three texts", table_3),
}
"""The parts by name: title, and what makes it. They run in this order."""
