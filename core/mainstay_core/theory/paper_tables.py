"""Holds the numbers that the MoEvement paper prints in tables 3, 6 and 7 (arXiv 2412.15411v5)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One system's numbers of one row.

    Attributes:
        interval: steps between two snapshots; the window for MoEvement, 1 for MoC.
        overhead_s: mean stall of a step.
        recovery_s: all recoveries of 12 hours together.
        ettr: the effective training time ratio.
    """

    interval: int
    overhead_s: float
    recovery_s: float
    ettr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of table 3 or 7: a job under one mean time between failures."""

    job: str
    mtbf_s: float
    checkfreq: Cell
    gemini: Cell
    moc: Cell
    sparse: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One row of table 6, in GB of host memory."""

    job: str
    gemini: float
    snapshots: float
    log: float


# A job's line: CheckFreq's interval and overhead, MoEvement's window and overhead. Below it for
# each MTBF in minutes: Gemini's interval and overhead, MoC's overhead, then recovery and ETTR of
# all four.
_TABLE_3 = """
MoE-LLaVa 57 0.03 3 0.01
120 46 0.02  0.14   1265  938  10  11 0.945 0.959 0.922 0.981
 60 38 0.07  2.14   2530 1551  20  24 0.914 0.939 0.375 0.979
 30 27 0.13  3.41   5059 2203  41  57 0.853 0.897 0.328 0.975
 20 21 0.21  5.39   7589 2570  61  74 0.792 0.852 0.231 0.971
 10 17 0.31  5.88  11178 4161  98 117 0.712 0.764 0.184 0.964
GPT-MoE 78 0.03 3 0.03
120 64 0.03  0.18   1424 1121  13  18 0.937 0.947 0.919 0.979
 60 49 0.06  3.32   2848 1718  25  28 0.903 0.923 0.384 0.976
 30 36 0.15  4.54   4486 2160  50  78 0.834 0.868 0.326 0.971
 20 31 0.22  7.90   8543 3259  76 105 0.765 0.815 0.220 0.966
 10 22 0.33  8.36  13086 4627 132 161 0.687 0.722 0.179 0.959
QWen-MoE 113 0.05 5 0.04
120 89 0.04  0.19   1170  961  15  17 0.927 0.934 0.927 0.981
 60 65 0.05  4.25   2340 1402  30  33 0.898 0.915 0.380 0.977
 30 48 0.11  7.10   4680 2114  60  83 0.841 0.868 0.325 0.970
 20 36 0.19  9.23   7020 2331  90 140 0.783 0.819 0.205 0.963
 10 27 0.25  9.68  10040 3495 146 207 0.703 0.717 0.162 0.957
DeepSeek-MoE 124 0.08 6 0.06
120 92 0.07  0.22    992  800  17  22 0.902 0.910 0.933 0.975
 60 70 0.09  5.75   1984 1218  35  43 0.877 0.894 0.349 0.970
 30 54 0.19  8.58   3967 1879  70 104 0.827 0.853 0.324 0.965
 20 38 0.25 12.87   5951 1983 104 167 0.777 0.814 0.168 0.956
 10 31 0.38 13.65   9402 3236 176 241 0.672 0.728 0.134 0.951
"""

_TABLE_7 = """
FP16/FP16/FP16+FP16 77 0.10 3 0.06
 60  71 0.11  1.16   2036 1854  79  86 0.918 0.925 0.613 0.984
 30  48 0.16  2.91   3549 2471 102 113 0.876 0.886 0.459 0.979
 10  27 0.29  3.51  10648 4324 246 268 0.706 0.795 0.425 0.973
FP8/FP32/FP32+FP32 227 0.06 6 0.05
 60 182 0.09  3.53   5162 3591  48  59 0.853 0.878 0.357 0.952
 30  94 0.17  8.89   9524 3709  75  96 0.748 0.839 0.196 0.946
 10  46 0.34 10.70  28574 5446 185 232 0.302 0.718 0.115 0.941
FP8/FP16/FP32+FP32 205 0.06 4 0.04
 60 157 0.08  2.88   3763 2846  45  53 0.881 0.893 0.368 0.966
 30  79 0.16  7.25   7527 2882  71  83 0.793 0.852 0.226 0.958
 10  43 0.30  8.73  22581 4756 151 172 0.439 0.738 0.163 0.953
FP8/FP16/FP8+FP16 94 0.07 3 0.04
 60  68 0.10  1.16   1554 1108  52  57 0.916 0.923 0.557 0.976
 30  61 0.11  2.92   3107 2022  85  94 0.889 0.894 0.349 0.968
 10  29 0.22  3.52   9322 2934 196 213 0.739 0.806 0.321 0.965
FP8/FP8/FP8+FP16 78 0.07 3 0.03
 60  59 0.09  0.87   1153  876  40  44 0.937 0.943 0.584 0.979
 30  52 0.18  2.19   2307 1516  79  85 0.905 0.907 0.381 0.976
 10  24 0.31  2.63   6921 2100 162 178 0.752 0.816 0.326 0.971
"""


def _rows(text: str) -> tuple[Row, ...]:
    rows: list[Row] = []
    job, interval, checkfreq_s, window, sparse_s = "", 0, 0.0, 0, 0.0
    for line in text.split("\n"):
        words = line.split()
        if len(words) == 5:
            job, interval, window = words[0], int(words[1]), int(words[3])
            checkfreq_s, sparse_s = float(words[2]), float(words[4])
        elif words:
            minutes, gemini = int(words[0]), int(words[1])
            gemini_s, moc_s, *rest = map(float, words[2:])
            intervals = (interval, gemini, 1, window)
            stalls_s = (checkfreq_s, gemini_s, moc_s, sparse_s)
            cells = [
                Cell(interval=i, overhead_s=stall_s, recovery_s=recovery_s, ettr=ettr)
                for i, stall_s, recovery_s, ettr in zip(
                    intervals, stalls_s, rest[:4], rest[4:], strict=True
                )
            ]
            rows.append(
                Row(
                    job=job,
                    mtbf_s=60.0 * minutes,
                    checkfreq=cells[0],
                    gemini=cells[1],
                    moc=cells[2],
                    sparse=cells[3],
                )
            )
    return tuple(rows)


TABLE_3 = _rows(_TABLE_3)
TABLE_7 = _rows(_TABLE_7)
TABLE_6 = (
    Memory(job="MoE-LLaVa", gemini=75.4, snapshots=81.2, log=1.9),
    Memory(job="GPT-MoE", gemini=189.8, snapshots=205.2, log=4.2),
    Memory(job="QWen-MoE", gemini=371.6, snapshots=420.8, log=12.4),
    Memory(job="DeepSeek-MoE", gemini=426.4, snapshots=478.7, log=21.1),
)
