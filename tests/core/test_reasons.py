"""No code looks into a sentence: the rule holds for the tree, and would notice if it did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "scripts" / "check_reasons.py"


def check(root: Path) -> tuple[int, str]:
    command = [sys.executable, str(CHECK), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def write(root: Path, code: str) -> Path:
    folder = root / "core"
    folder.mkdir()
    (folder / "decides.py").write_text(code)
    return root


def test_no_code_of_the_tree_looks_into_a_sentence() -> None:
    code, told = check(ROOT)
    assert code == 0, told


@pytest.mark.parametrize(
    "code",
    [
        "def f(problem): return 'not reached' in problem",
        "def f(verdict): return verdict.reason.partition(' differ ')",
        "def f(old, reason): return old.reason == reason",
        "def f(pod, WHY): return pod.ended_for.startswith(WHY)",
        "def f(found, reason): return found.setdefault(reason, [])",
        "def f(names, why): return names[why]",
        "def f(recovery): return re.search('x', recovery['fault'] + recovery['reason'])",
        "def f(reply): return reply.get('message', '').lower() != 'x'",
        "def f():\n try: g()\n except Exception as error: return 'x' in str(error)",
        "def f():\n try: g()\n except OSError as end:\n  said = str(end)\n  return said == 'x'",
        "def f(error: ValueError): return str(error).split()[0]",
        "def f(origin): return origin == 'the members that stayed'",
        "def f(said): return said in ('a word', 'other words')",
        "def f(a):\n match a.reason:\n  case 'x': return 1",
        "def f(why): return why[0]",
        "def f(why):\n def g(): return why == 'x'\n return g",
    ],
)
def test_whoever_looks_into_a_sentence_is_named(tmp_path: Path, code: str) -> None:
    code, told = check(write(tmp_path, code))
    assert (code, "core/decides.py:f" in told) == (1, True), told


@pytest.mark.parametrize(
    "code",
    [
        "def f(problem): return f'{problem}; more' if problem else ''",
        "def f(waiting, old): return waiting == old",
        "def f(why, notes): notes.append(why[:100]); return why or 'no detail'",
        "def f(error): return error.status in (0, 503)",
        "def f(condition): return code_of(condition) == 'Unschedulable'",
        "def f(message):\n match message:\n  case Join(): return 1",
        "def f(message): return message['type'] == 'http.request'",
        "def f(reason): return reason is None",
    ],
)
def test_a_sentence_may_be_shown_shortened_and_asked_whether_it_is_there(
    tmp_path: Path, code: str
) -> None:
    told = check(write(tmp_path, code))[1]
    assert "core/decides.py" not in told


def test_an_exception_that_nothing_needs_is_named(tmp_path: Path) -> None:
    code, told = check(write(tmp_path, ""))
    assert code == 1
    assert "loop.py:run: an exception that nothing needs" in told
