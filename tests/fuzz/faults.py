"""Fuzzes faults files, for a job before it starts and for one that runs."""

from __future__ import annotations

from tests.fuzz.specs import CONFIG, FAULTS
from tests.fuzz.texts import NamedTexts, check_error, split

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.base.ids import RankId
from mainstay_core.faults.files import Job, parse_more
from mainstay_core.faults.points import FaultPoint, View

JOBS = {
    "new": Job(shape=CONFIG.shape, num_spares=1, has_snapshots=True),
    "running": Job(shape=CONFIG.shape, num_spares=1, at_step=2),
}


class Faults:
    """Faults files as a user may write them."""

    name = "faults"

    def __init__(self) -> None:
        self._texts = NamedTexts({name: [FAULTS, FAULTS[:1], FAULTS[3:6]] for name in JOBS})
        self.examples, self.make = self._texts.examples, self._texts.make
        self.smaller = self._texts.smaller

    def judge(self, data: bytes) -> bool:
        name, text = split(data)
        try:
            document = codec.parse_json(text, "faults")
        except MalformedError:
            return False
        try:
            faults = parse_more(document, JOBS.get(name, JOBS["new"]))
        except InvalidSpecError as error:
            check_error(error)
            return False
        written = codec.dumps(faults)
        again = codec.loads(tuple[FaultPoint, ...], written.encode())
        assert again == faults, "its pods read something else"
        for fault in faults:
            fault.matches(3, RankId(replica=1, stage=0), "BACKWARD_INPUT", View(fired=("a",)))
        return True


TARGET = Faults
