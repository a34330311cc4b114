"""``python -m mainstay_train.launcher``: the launcher of one pod."""

from __future__ import annotations

import sys

from mainstay_train.launcher.launcher import main

if __name__ == "__main__":
    sys.exit(main())
