"""Judges inputs within bounds, one after the other, and keeps those that show a fault.

Input number n of a target is a function of the seed and of n alone. So a fault is found again
without the inputs before it, and it does not matter how many processes share the work.

A worker is a process of its own: an input may end it (by a signal, or for want of memory) or keep
it for ever. The input that is being judged lies in memory that both share, so that it is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import multiprocessing
import os
import random
import re
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Protocol

from tests.fuzz.mutation import MAX_BYTES

STUCK_S = 60.0
"""Without a next input, in which a worker waits for something, or of processor time: then it is
ended. A worker that only waits for its turn on a busy machine is not stuck."""
SHRINK_TRIES = 400
TELL_EVERY = 256
CORPUS = Path(__file__).with_name("corpus")
_HEAD = struct.Struct("=QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on what one input may take."""

    cpu_s: float = 2.0
    """Processor time. The slowest valid inputs take some ten milliseconds."""
    growth_mib: int = 256
    """Memory beyond what the process has when all valid inputs were judged: a thousand times the
    longest input."""


BOUNDS = Bounds()


class Target(Protocol):
    """Something that takes bytes from strangers."""

    name: str

    def examples(self) -> list[bytes]:
        """Return valid inputs: none of them may be refused."""

    def make(self, draw: random.Random) -> bytes:
        """Return an input."""

    def judge(self, data: bytes) -> bool:
        """Return whether an input is accepted; False if it is refused as documented.

        Whatever else comes of it is raised.
        """

    def smaller(self, data: bytes) -> Iterator[bytes]:
        """Yield smaller inputs that may show the same."""


class BoundError(BaseException):
    """An input took more time or memory than it may.

    No ``except Exception`` of the product takes it for trouble of its own.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input of which something comes that is not documented."""

    data: bytes
    what: str
    """Names the fault: the error, and where in our code it was raised."""
    told: str
    """The whole traceback."""
    is_costly: bool = False
    """Whether it took too much: a search for a smaller input would take that many times."""


@dataclass(slots=True)
class Tally:
    """The counts of one target's run."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    findings: dict[str, Path] = field(default_factory=dict)

    def __str__(self) -> str:
        share = 100 * self.accepted / max(1, self.inputs)
        pace = self.inputs / max(1e-9, self.seconds)
        return (
            f"{self.inputs:,} inputs in {self.seconds:.0f} s ({pace:,.0f}/s), {share:.0f} % "
            f"accepted, {len(self.findings)} findings"
        )


def input_of(target: Target, seed: int, number: int) -> bytes:
    """Return input ``number`` of a target."""
    return target.make(random.Random(f"{seed}/{target.name}/{number}"))[:MAX_BYTES]


# One input ------------------------------------------------------------------------------


def examine(
    target: Target, data: bytes, base_kib: int | None = None, bounds: Bounds = BOUNDS
) -> bool | Finding:
    """Return whether an input is accepted, or what is wrong with what came of it.

    Args:
        target: takes it.
        data: the input.
        base_kib: peak of this process's memory to compare with; None: that of now.
        bounds: on what it may take.
    """
    base_kib = _peak_kib() if base_kib is None else base_kib
    before_s = time.process_time()
    try:
        with _alarm(2 * bounds.cpu_s):
            accepted = target.judge(data)
        spent_s = time.process_time() - before_s
        if spent_s > bounds.cpu_s:
            raise BoundError(f"it took {spent_s:.1f} s of processor time")
        grown_mib = (_peak_kib() - base_kib) >> 10
        if grown_mib > bounds.growth_mib:
            raise BoundError(f"it took {grown_mib} MiB of memory")
    except (Exception, BoundError) as error:
        costly = isinstance(error, BoundError)
        return Finding(data=data, what=_name_of(error), told=_show(error), is_costly=costly)
    return accepted


def shrink(target: Target, finding: Finding, bounds: Bounds = BOUNDS) -> Finding:
    """Return the smallest input that a bounded search finds to show the same fault."""
    tries, found = 0, not finding.is_costly
    while found and tries < SHRINK_TRIES:
        found = False
        for data in target.smaller(finding.data):
            tries += 1
            if tries > SHRINK_TRIES:
                break
            if len(data) >= len(finding.data):
                continue
            other = examine(target, data, bounds=bounds)
            if isinstance(other, Finding) and other.what == finding.what:
                finding, found = other, True
                break
    return finding


def keep(finding: Finding, target: str, corpus: Path = CORPUS) -> Path:
    """Write a finding's input to the corpus; return its file."""
    words = re.sub(r"[^a-z0-9]+", "-", finding.what.lower()).strip("-")[:60]
    path = corpus / target / f"{words}-{hashlib.sha256(finding.data).hexdigest()[:8]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(finding.data)
    return path


@contextlib.contextmanager
def _alarm(cpu_s: float) -> Iterator[None]:
    """Raise BoundError in what runs meanwhile once its processor time is used up."""
    previous = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise BoundError("it was stopped: it took too much processor time")


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _show(error: BaseException) -> str:
    """Return a traceback that a terminal can show, whatever the input was."""
    lines = "".join(traceback.format_exception(error, limit=-20)).splitlines()
    return "\n".join(ascii(line)[1:-1][:300] for line in lines[-80:])


def _name_of(error: BaseException) -> str:
    """Return error, beginning of its words, and the place in our code that it came from."""
    words = re.sub(r"[^a-z ]+", " ", str(error).partition("\n")[0].lower()).split()
    place = next(filter(None, map(_place_of, (error, error.__cause__, error.__context__))), "")
    return " ".join([type(error).__name__, *words[:6], place]).strip()


def _place_of(error: BaseException | None) -> str:
    if error is None:
        return ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/mainstay_" in f.filename]
    return f"in {Path(frames[-1].filename).stem} {frames[-1].name}" if frames else ""


# Many inputs -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The share of one worker: inputs ``first``, ``first + step``, ... of a target."""

    target: str
    load: Callable[[str], Target]
    """Makes the target, in the worker alone: what it imports may start threads."""
    seed: int
    first: int
    step: int
    stop: int | None
    """Number before which it ends; None: only the time ends it."""
    seconds: float
    bounds: Bounds = BOUNDS


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts that a worker tells every now and then."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0


class Worker:
    """A process that judges a share of a target's inputs, and what it has told so far."""

    def __init__(self, task: Task) -> None:
        # Nothing of ours has started a thread by now: forking is safe, and needs no pickling.
        context = multiprocessing.get_context("fork")
        self.task = task
        self.lines, theirs = context.Pipe(duplex=False)
        self._memory = mmap.mmap(-1, _HEAD.size + MAX_BYTES)
        self.process = context.Process(target=_work, args=(task, self._memory, theirs))
        self.process.start()
        theirs.close()
        self.progress = Progress()
        self._number, self._moved_at_s, self._cpu_s = -1, 0.0, 0.0

    def judged(self) -> tuple[int, bytes]:
        """Return number and bytes of the input that is judged now."""
        number, size = _HEAD.unpack(self._memory[: _HEAD.size])
        return number, self._memory[_HEAD.size : _HEAD.size + size]

    def is_stuck(self) -> bool:
        """Return whether the worker has been at the same input for too long; ask every second."""
        (number, _), (state, cpu_s), now_s = self.judged(), self._look(), time.monotonic()
        if number != self._number or state == "R":
            self._moved_at_s = now_s
        if number != self._number:
            self._number, self._cpu_s = number, cpu_s
        return now_s - self._moved_at_s > STUCK_S or cpu_s - self._cpu_s > STUCK_S

    def _look(self) -> tuple[str, float]:
        """Return the worker's state and its processor time, as the kernel tells them."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:  # it has ended
            return "R", 0.0
        fields = text.rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(task: Task, memory: mmap.mmap, lines: Connection) -> None:
    logging.disable(logging.CRITICAL)
    target = task.load(task.target)
    for data in target.examples():
        accepted = examine(target, data)
        assert accepted is True, f"{task.target} refuses a valid input: {data[:200]!r}: {accepted}"
    base_kib = _peak_kib()
    ceiling = (base_kib << 10) + (8 * task.bounds.growth_mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
    known: set[str] = set()
    started_s = time.monotonic()
    number, inputs, accepted, seconds = task.first, 0, 0, 0.0
    while (task.stop is None or number < task.stop) and seconds < task.seconds:
        data = input_of(target, task.seed, number)
        memory[: _HEAD.size + len(data)] = _HEAD.pack(number, len(data)) + data
        found = examine(target, data, base_kib, task.bounds)
        if not isinstance(found, Finding):
            accepted += found
        elif found.what not in known:
            known.add(found.what)
            lines.send((number, shrink(target, found, task.bounds)))
            # Its peak stays: what comes next is compared with that.
            base_kib = max(base_kib, _peak_kib())
        number, inputs, seconds = number + task.step, inputs + 1, time.monotonic() - started_s
        if inputs % TELL_EVERY == 0:
            lines.send(Progress(inputs, accepted, seconds))
    lines.send(Progress(inputs, accepted, seconds))


def run(task: Task, jobs: int, say: Callable[[str], object], corpus: Path = CORPUS) -> Tally:
    """Run a target's inputs in ``jobs`` processes; keep what they find, and tell it."""
    total = Tally()
    workers: dict[object, Worker] = {}
    for i in range(jobs):
        share = replace(task, first=task.first + i * task.step, step=task.step * jobs)
        worker = Worker(share)
        workers[worker.lines] = worker
    while workers:
        for worker in workers.values():
            if worker.is_stuck():
                worker.process.kill()
        for lines in wait([worker.lines for worker in workers.values()], timeout=1.0):
            worker = workers[lines]
            try:
                line = worker.lines.recv()
            except EOFError:
                del workers[lines]
                again = _end(worker, total, say, corpus)
                if again is not None:
                    workers[again.lines] = again
                continue
            if isinstance(line, Progress):
                worker.progress = line
            else:
                _note(total, worker.task, *line, say, corpus)
    return total


def _end(worker: Worker, total: Tally, say: Callable[[str], object], corpus: Path) -> Worker | None:
    """Count what a worker has done; returns another one if an input has ended it."""
    worker.process.join()
    worker.lines.close()
    total.accepted += worker.progress.accepted
    total.seconds = max(total.seconds, worker.progress.seconds)
    code = worker.process.exitcode
    if not code:
        total.inputs += worker.progress.inputs
        return None
    number, data = worker.judged()
    total.inputs += (number - worker.task.first) // worker.task.step + 1
    what = f"the worker ended with {code}"
    if code > 0 or not data:
        raise SystemExit(f"{worker.task.target}: {what}, by a fault of the target's own")
    _note(total, worker.task, number, Finding(data=data, what=what, told=what), say, corpus)
    left_s = worker.task.seconds - worker.progress.seconds
    return Worker(replace(worker.task, first=number + worker.task.step, seconds=left_s))


def _note(
    total: Tally,
    task: Task,
    number: int,
    finding: Finding,
    say: Callable[[str], object],
    corpus: Path,
) -> None:
    if finding.what in total.findings:
        return
    path = total.findings[finding.what] = keep(finding, task.target, corpus)
    command = ".venv/bin/python -m tests.fuzz"
    say(
        f"FOUND {task.target}: {finding.what}\n{finding.told}\n"
        f"  kept as {path}\n"
        f"  repeat: {command} {path}\n"
        f"  or:     {command} --targets {task.target} --seed {task.seed} --only {number}"
    )
