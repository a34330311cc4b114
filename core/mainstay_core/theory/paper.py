"""Lists all comparisons with the MoEvement paper (arXiv 2412.15411v5), in the order of its text."""

from __future__ import annotations

from mainstay_core.theory import built_sections, figure_sections, ratio_sections, size_sections
from mainstay_core.theory.comparison import Section


def compare_paper() -> tuple[Section, ...]:
    """Return every number of the paper that is computed here, beside ours. Takes a second."""
    return (
        size_sections.compare_figure_6(),
        size_sections.compare_windows(),
        size_sections.compare_memory(),
        ratio_sections.compare_table_3(),
        ratio_sections.compare_table_7(),
        ratio_sections.compare_recovery(),
        ratio_sections.compare_intervals(),
        ratio_sections.compare_simulation(),
        figure_sections.compare_figure_10(),
        figure_sections.compare_figure_11(),
        figure_sections.compare_figure_16(),
        size_sections.compare_alphas(),
        built_sections.compare_replay_lengths(),
        built_sections.compare_built(),
    )
