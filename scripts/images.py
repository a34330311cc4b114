"""Builds the images mainstay-operator, mainstay-api and mainstay-agent.

Usage: python scripts/images.py [--component NAME] [--tag TAG] [--registry PREFIX] [--no-build]

First what each image holds is put together in build/site, from the lock and this checkout; then
docker, podman or buildah (ENGINE, or the first on PATH that works) builds images/Dockerfile. No
package index is reached from within a build.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build/site"
PACKAGES = {
    "operator": ("core/mainstay_core", "core/mainstay_net", "operator/mainstay_operator"),
    "api": ("core/mainstay_core", "core/mainstay_net", "api/mainstay_api"),
    "agent": (
        "core/mainstay_core",
        "core/mainstay_fork",
        "core/mainstay_net",
        "agent/mainstay_agent",
        "agent/mainstay_train",
    ),
}
"""Our packages in each image, beside what requirements/NAME.txt pins."""
ENGINES = ("docker", "podman", "buildah")
ANSWER_S = 20.0
"""How long an engine may take to say that it works: a daemon that is started by the question takes
seconds, and a socket that is dead may never answer."""
PYTHON = "3.11"
GLIBC = "2_36"
"""Of Debian 12."""
PLATFORMS = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


def find_uv() -> str:
    """Return the uv to use: that of this environment first."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        sys.exit("images: there is no uv; run make setup")
    return found


def collect(component: str, machine: str) -> Path:
    """Put together what an image holds; return the folder."""
    folder = SITE / component
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--python-version", PYTHON, "--only-binary", ":all:", "--link-mode", "copy"]
    command += ["--python-platform", f"{machine}-manylinux_{GLIBC}", "--target", str(folder)]
    command += ["--requirement", str(ROOT / f"requirements/{component}.txt")]
    subprocess.run(command, check=True, cwd=ROOT)
    for name in PACKAGES[component]:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / Path(name).name, ignore=ignored)
    # A third of what numpy and scipy weigh is their own tests.
    for tests in [path for path in folder.rglob("tests") if path.is_dir()]:
        shutil.rmtree(tests, ignore_errors=True)
    for path in (folder / "bin", folder / ".lock"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return folder


def find_engine() -> str:
    """Return the program that builds images: ENGINE, or the first of ENGINES that works."""
    named = os.environ.get("ENGINE")
    if named:
        return named
    problems = []
    for engine in ENGINES:
        problem = find_problem(engine) if shutil.which(engine) else "is not on PATH"
        if not problem:
            return engine
        problems.append(f"  {engine}: {problem}")
    sys.exit("\n".join(["images: no engine works here; name another by ENGINE", *problems]))


def find_problem(engine: str) -> str:
    """Return why an engine does not work; empty if it does.

    That a program is there says nothing: docker's needs a daemon behind its socket.
    """
    try:
        done = subprocess.run(
            [engine, "info"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        return f"`{engine} info` has not answered for {ANSWER_S:g} s"
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    if done.returncode == 0:
        return ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return said[0] if said else f"`{engine} info` failed with {done.returncode}"


def build(engine: str, component: str, image: str, base: str, platform_: str) -> None:
    """Build one image and tag it."""
    command = [engine, "bud" if Path(engine).name == "buildah" else "build"]
    command += ["--layers"] if Path(engine).name == "buildah" else []
    command += ["--platform", platform_, "--build-arg", f"BASE={base}", "--target", component]
    command += ["--file", "images/Dockerfile", "--tag", image, "."]
    print(f"images: building {image}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--component", action="append", choices=sorted(PACKAGES), help="may be repeated (all)"
    )
    parser.add_argument("--tag", default=version, help=f"of the images ({version})")
    parser.add_argument("--registry", default="", help="put before the images' names")
    parser.add_argument(
        "--base", default="debian:bookworm-slim", help="has Python 3.11, or apt-get"
    )
    parser.add_argument("--arch", default=platform.machine(), choices=sorted(PLATFORMS))
    parser.add_argument("--no-build", action="store_true", help="only put build/site together")
    options = parser.parse_args()
    machine = PLATFORMS[options.arch]
    # Before minutes go into what would not be built.
    engine = "" if options.no_build else find_engine()
    for component in options.component or sorted(PACKAGES):
        folder = collect(component, machine)
        print(f"images: {folder.relative_to(ROOT)} is ready", flush=True)
        if engine:
            prefix = f"{options.registry.rstrip('/')}/" if options.registry else ""
            arch = "amd64" if machine == "x86_64" else "arm64"
            image = f"{prefix}mainstay-{component}:{options.tag}"
            build(engine, component, image, options.base, f"linux/{arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
