"""Writes the CustomResourceDefinition that the TrainingJob model describes.

Usage: python scripts/crd.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from mainstay_core.crd import build_crd

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "charts/mainstay/files/crd.yaml", ROOT / "manifests/crd.yaml")
HEADER = (
    "# Generated from the model in core/mainstay_core/spec.py by scripts/crd.py; do not edit.\n"
)


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: equal parts are written out each time."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def render() -> str:
    """Return the CRD's YAML."""
    text = yaml.dump(build_crd(), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=False)
    return HEADER + text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    check = parser.parse_args().check
    text = render()
    differing = [path for path in FILES if not path.is_file() or path.read_text() != text]
    for path in differing:
        shown = path.relative_to(ROOT)
        if check:
            print(f"{shown}: is not what the model describes; run `make crd`")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"{shown}: written")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
