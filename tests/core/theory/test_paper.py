"""The numbers of the MoEvement paper: each printed one, ours, and how far they may lie apart."""

from __future__ import annotations

import pytest

from mainstay_core.snapshots.windows import PrintedWindow, generate_schedule
from mainstay_core.theory import (
    built_sections,
    figure_sections,
    paper_jobs,
    paper_tables,
    ratio_sections,
    size_sections,
)
from mainstay_core.theory.comparison import Comparison, Section
from mainstay_core.theory.ettr import dense_recovery_s, ettr, sparse_recovery_s
from mainstay_core.theory.figure_sections import draw_layers, run_figure_10, skewed_ettr
from mainstay_core.theory.model_units import find_printed_window
from mainstay_core.theory.paper import compare_paper
from mainstay_core.theory.paper_tables import Row
from mainstay_core.theory.sizes import instalment_bytes

HOURS_12_S = 43_200.0


def ours(section: Section, what: str) -> float:
    (row,) = [row for row in section.rows if row.what == what]
    return row.ours


def describe(row: Row) -> str:
    return f"{row.job} {row.mtbf_s / 60:.0f} min"


def sparse_ettr(row: Row, step_s: float, downtime_s: float) -> float:
    """Return the closed form from printed seconds, computed here by itself."""
    failures = HOURS_12_S / row.mtbf_s
    recovery_s = row.sparse.recovery_s / failures + downtime_s
    return 1 / (1 + row.sparse.overhead_s / step_s) / (1 + recovery_s / row.mtbf_s)


def test_figure_6_has_instalments_of_32_28_and_24_of_72_bytes() -> None:
    schedule = generate_schedule(
        ("E1", "E2", "E3", "E4", "NE", "G"), PrintedWindow(length=3, num_active=2)
    )
    types = paper_jobs.FP16_FP32
    sizes = [instalment_bytes(types, len(active), len(frozen)) for active, frozen in schedule]

    assert sizes == [32, 28, 24]
    assert instalment_bytes(types, 6, 0) == 72
    assert ours(size_sections.compare_figure_6(), "first instalment below dense, %") == (
        pytest.approx(55, abs=1)
    )


def test_one_rate_gives_the_windows_of_table_7_but_for_one() -> None:
    windows = [find_printed_window(job).length for job in paper_jobs.TABLE_7.values()]

    assert paper_jobs.TABLE_7_RATE_PER_PARAM == 1.28
    assert windows == [3, 6, 6, 3, 3]
    assert [row.sparse.interval for row in paper_tables.TABLE_7[::3]] == [3, 6, 4, 3, 3]


def test_no_rate_gives_all_windows_of_table_7() -> None:
    _, longest_of_6 = size_sections.bound_rates(paper_jobs.TABLE_7["FP8/FP32/FP32+FP32"], 6)
    least_of_4, _ = size_sections.bound_rates(paper_jobs.TABLE_7["FP8/FP16/FP32+FP32"], 4)

    assert longest_of_6 < least_of_4
    assert (longest_of_6, least_of_4) == pytest.approx((1.39, 1.55), abs=0.01)


def test_windows_of_table_3_are_the_printed_ones() -> None:
    windows = [find_printed_window(job).length for job in paper_jobs.TABLE_3.values()]

    assert windows == [row.sparse.interval for row in paper_tables.TABLE_3[::5]] == [3, 3, 5, 6]


@pytest.mark.parametrize("row", paper_tables.TABLE_6, ids=lambda row: row.job)
def test_geminis_memory_is_26_bytes_a_parameter(row: paper_tables.Memory) -> None:
    params = paper_jobs.MODELS[row.job].num_params

    assert row.gemini * 1e9 / params == pytest.approx(26.0, abs=0.05)
    name = f"{row.job}: Gemini, B per parameter"
    assert ours(size_sections.compare_memory(), name) == 26.0


@pytest.mark.parametrize(
    ("job", "window", "printed", "found"),
    [
        ("MoE-LLaVa", 3, 2.0, 2.0),
        ("GPT-MoE", 3, 2.1, 2.0),
        ("QWen-MoE", 5, 3.4, 4.0),
        ("DeepSeek-MoE", 6, 3.2, 5.0),
    ],
)
def test_frozen_copies_are_c_times_half_of_the_window_less_one(
    job: str, window: int, printed: float, found: float
) -> None:
    (row,) = [row for row in paper_tables.TABLE_6 if row.job == job]
    params = paper_jobs.MODELS[job].num_params
    name = f"{job}: frozen copies, c (W - 1) / 2 with W = {window}"

    assert (row.snapshots - row.gemini) * 1e9 / params == pytest.approx(printed, abs=0.05)
    assert ours(size_sections.compare_memory(), name) == pytest.approx(found)


def test_the_printed_log_is_a_fiftieth_of_what_the_job_gives() -> None:
    log_gb = ours(size_sections.compare_memory(), "DeepSeek-MoE: log of 11 steps, GB")

    assert log_gb / 21.1 == pytest.approx(50, rel=0.03)


@pytest.mark.parametrize("row", paper_tables.TABLE_3, ids=describe)
def test_the_closed_form_gives_moevements_ettr_of_table_3(row: Row) -> None:
    found = ours(ratio_sections.compare_table_3(), f"{describe(row)} MoEvement")
    step_s = {"MoE-LLaVa": 1.69, "GPT-MoE": 2.11, "QWen-MoE": 2.51, "DeepSeek-MoE": 2.90}[row.job]

    assert found == pytest.approx(sparse_ettr(row, step_s, 21.0))
    for downtime_s in (20.0, 21.0, 22.0):
        assert sparse_ettr(row, step_s, downtime_s) == pytest.approx(row.sparse.ettr, abs=0.015)


@pytest.mark.parametrize("row", paper_tables.TABLE_7, ids=describe)
def test_the_closed_form_gives_moevements_ettr_of_table_7(row: Row) -> None:
    found = ours(ratio_sections.compare_table_7(), f"{describe(row)} MoEvement")

    assert found == pytest.approx(sparse_ettr(row, paper_jobs.TABLE_7[row.job].step_s, 15.0))
    assert found == pytest.approx(row.sparse.ettr, abs=0.03)


@pytest.mark.parametrize("row", paper_tables.TABLE_3, ids=describe)
def test_geminis_recovery_is_k_times_half_of_its_interval(row: Row) -> None:
    job = paper_jobs.TABLE_3[row.job]
    per_failure_s = dense_recovery_s(row.gemini.interval, job.step_s, job.rollback_factor)
    off = row.gemini.recovery_s / (HOURS_12_S / row.mtbf_s * per_failure_s) - 1

    if describe(row) == "GPT-MoE 30 min":
        assert off == pytest.approx(-0.14, abs=0.01)
    else:
        assert abs(off) <= 0.03


def test_one_factor_per_model_makes_geminis_recovery() -> None:
    factors = {job.name: round(job.rollback_factor, 1) for job in paper_jobs.TABLE_3.values()}

    assert factors == {
        "MoE-LLaVa": 4.0,
        "GPT-MoE": 2.8,
        "QWen-MoE": 1.4,
        "DeepSeek-MoE": 1.0,
    }


@pytest.mark.parametrize("row", [*paper_tables.TABLE_3, *paper_tables.TABLE_7], ids=describe)
def test_the_papers_formula_is_2_to_8_times_its_printed_recovery(row: Row) -> None:
    job = paper_jobs.TABLE_3.get(row.job) or paper_jobs.TABLE_7[row.job]
    formula_s = HOURS_12_S / row.mtbf_s * 1.5 * row.sparse.interval * job.step_s
    found = ours(ratio_sections.compare_recovery(), f"{describe(row)} MoEvement, s")

    assert found == pytest.approx(formula_s)
    assert 1.75 <= formula_s / row.sparse.recovery_s <= 8


@pytest.mark.parametrize("row", paper_tables.TABLE_3, ids=describe)
def test_one_stall_per_model_gives_the_oracles_intervals(row: Row) -> None:
    found = ours(ratio_sections.compare_intervals(), f"{describe(row)} Gemini, steps")

    assert found == pytest.approx(row.gemini.interval, rel=0.2)


def test_one_rate_gives_checkfreqs_intervals_of_table_7() -> None:
    section = ratio_sections.compare_intervals()
    found = [ours(section, f"{job} CheckFreq, steps") for job in paper_jobs.TABLE_7]

    assert found[1:] == pytest.approx([227, 205, 94, 78], rel=0.07)
    assert found[0] == pytest.approx(77, rel=0.2)


def test_figure_10s_ratios_are_within_a_tenth() -> None:
    job = paper_jobs.TABLE_3["DeepSeek-MoE"]
    ratios = run_figure_10(job, figure_sections.FIGURE_10_SEED)
    found = [ratios["MoEvement"] / ratios[name] for name in ("CheckFreq", "Gemini", "MoC")]

    assert found == pytest.approx([1.25, 1.15, 1.98], rel=0.1)
    assert figure_sections.FIGURE_10_FAILURES == 24


def test_figure_11_has_the_papers_accelerators_and_ratios() -> None:
    section = figure_sections.compare_figure_11()
    jobs = ("DeepSeek 32B", "DeepSeek 67B", "DeepSeek 145B", "DeepSeek 671B")

    assert [ours(section, f"{job}: accelerators") for job in jobs] == [512, 1536, 4096, 16384]
    assert all(ours(section, f"{job} 1 h MoEvement") >= 0.91 for job in jobs)
    assert ours(section, "DeepSeek 671B 10 min MoEvement") == pytest.approx(0.86, abs=0.03)
    assert ours(section, "DeepSeek 671B 10 min Gemini") == pytest.approx(0.55, abs=0.03)


def test_ettr_does_not_fall_with_skewness() -> None:
    job = paper_jobs.TABLE_3["DeepSeek-MoE"]
    found = [
        skewed_ettr(job, draw_layers(job, skewness), 0.06, 600.0)
        for skewness in figure_sections.SKEWNESSES
    ]

    assert found == sorted(found)
    assert found[-1] > found[0]
    all_active_s = sparse_recovery_s(6, job.step_s) + job.downtime_s
    assert found[0] > ettr(0.06 / job.step_s, all_active_s, 600.0)


def test_mocs_ettr_falls_with_skewness() -> None:
    section = figure_sections.compare_figure_16()
    found = [ours(section, f"MoC, skewness {s:.2f}") for s in figure_sections.SKEWNESSES]

    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_simulated_runs_are_near_the_closed_form() -> None:
    section = ratio_sections.compare_simulation()

    assert len(section.rows) == 4
    assert all(abs(row.ours - (row.printed or 0)) < 0.01 for row in section.rows)


def test_replays_are_listed_by_window_and_lag() -> None:
    section = built_sections.compare_replay_lengths()

    assert ours(section, "W = 6, lag 0: mean steps") == 9
    assert ours(section, "W = 6, lag 1: mean steps") == 10.5
    assert ours(section, "W = 3, lag 4: mean steps") == 10.5


def test_every_number_that_is_judged_lies_as_near_as_it_must() -> None:
    rows = [row for section in compare_paper() for row in section.rows]

    assert [row.what for row in rows if not row.holds] == []
    assert sum(row.allowed is not None for row in rows) > 100


def test_a_number_that_lies_too_far_off_does_not_hold() -> None:
    row = Comparison(what="x", printed=1.0, ours=1.2, allowed=0.1)

    assert not row.holds
    assert row.deviation == pytest.approx(0.2)
    bound = Comparison(what="x", printed=1.0, ours=1.2, allowed=0.0, is_least=True)
    assert bound.holds
    assert not Comparison(what="x", printed=1.0, ours=0.9, allowed=0.0, is_least=True).holds
    assert Comparison(what="x", printed=None, ours=0.9, allowed=0.0).holds
