"""Measures torchrun's elastic restart: from kill -9 of a worker to the next new step of all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINEE = Path(__file__).with_name("torchrun_llama.py")
WORKERS = 3
STEPS_BETWEEN = 20
GIVE_UP_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One kill, and the restart that follows."""

    after_s: float
    """From the kill to the first new step that all workers have done."""
    step_s: float
    """Median of the steps before."""


def measure(kills: int, agents: int, config: Mapping[str, Any]) -> list[Restart]:
    """Kill one worker ``kills`` times; one agent with all workers, or an agent for each.

    torch 2.13 needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or a restarted gloo group finds the
    addresses of the former one; everything else is as it comes.

    Raises:
        RuntimeError: it did not come back.
    """
    with tempfile.TemporaryDirectory(prefix="bench-torchrun-") as name:
        directory = Path(name)
        port = _free_port()
        started = [
            _start(directory, number, agents, port, kills, config) for number in range(agents)
        ]
        try:
            _await_step(directory, STEPS_BETWEEN, 0.0)
            return [_kill_one(directory, number) for number in range(kills)]
        except RuntimeError as error:
            log = (directory / "agent-0.log").read_text()[-3000:]
            raise RuntimeError(f"{error}\n{log}") from error
        finally:
            for agent in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGTERM)
            for agent in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(20)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def _start(
    directory: Path, number: int, agents: int, port: int, kills: int, config: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(agents), "--nproc-per-node", str(WORKERS // agents)]
    command += ["--max-restarts", str(kills + 2), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-conf", f"is_host={int(number == 0)}"]
    command += [str(TRAINEE), str(directory), json.dumps(dict(config))]
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with (directory / f"agent-{number}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _kill_one(directory: Path, number: int) -> Restart:
    steps = _steps(directory)
    newest = min(max(lines) for lines in steps.values())
    _await_step(directory, newest + STEPS_BETWEEN, 0.0)
    before = _steps(directory)[0]
    recent = sorted(before)[-STEPS_BETWEEN:]
    step_s = statistics.median(before[b][0] - before[a][0] for a, b in itertools.pairwise(recent))
    victim = _steps(directory)[number % WORKERS]
    at_s = time.time()
    os.kill(victim[max(victim)][1], signal.SIGKILL)
    back_s = _await_step(directory, None, at_s)
    return Restart(after_s=back_s - at_s, step_s=step_s)


def _await_step(directory: Path, step: int | None, after_s: float) -> float:
    """Wait until all workers have done ``step``, or one that none had done at ``after_s``."""
    deadline_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline_s:
        steps = _steps(directory)
        if len(steps) == WORKERS:
            wanted = step
            if wanted is None:
                old = [
                    s for lines in steps.values() for s, (at, _) in lines.items() if at < after_s
                ]
                wanted = max(old) + 1
            done = [lines[wanted][0] for lines in steps.values() if wanted in lines]
            if len(done) == WORKERS and min(done) > after_s:
                return max(done)
        time.sleep(0.05)
    raise RuntimeError("torchrun did not come back")


def _steps(directory: Path) -> dict[int, dict[int, tuple[float, int]]]:
    """By rank: step -> (wall clock, pid), the newest of each."""
    found: dict[int, dict[int, tuple[float, int]]] = {}
    for path in directory.glob("steps-*.jsonl"):
        lines = {}
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                lines[line["step"]] = (line["at_s"], line["pid"])
        if lines:
            found[int(path.stem.partition("-")[2])] = lines
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
