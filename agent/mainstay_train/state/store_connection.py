"""Connects a trainer to its pod's store of segments: requests, answers, and how that ends.

The store gives its arena first. Then a trainer sends numbered requests, and a thread reads the
answers. Whoever waits for one is woken when the connection ends.
"""

from __future__ import annotations

import itertools
import mmap
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from mainstay_core.base.errors import MainstayError, RemoteProtocolError
from mainstay_core.base.frames import FrameParser
from mainstay_core.segments import frames
from mainstay_train.state.arena import READ_BYTES, receive_arena

WELCOME_S = 60.0
"""How long the store may take to give its arena. It is in the same pod, and was there before the
pod was known to anybody."""


class StoreGone(MainstayError):  # noqa: N818 - a state, not a failure
    """The pod's store cannot be asked any more: it has ended, or this side was shut down."""


class StoreConnection:
    """Requests to a pod's store, and its answers, by the numbers of the requests.

    All methods may be called from any thread.

    Args:
        path: Unix socket of the store.
        slot: of the trainer.
        incarnation: this life of the trainer.
        note_held: takes what holders say of a segment. The reader thread calls it under
            :attr:`changed`.

    Raises:
        OSError: the store is not there.
        RemoteProtocolError: who is there is no store.
    """

    def __init__(
        self, path: str, slot: int, incarnation: str, note_held: Callable[[frames.Held], None]
    ) -> None:
        self._note_held = note_held
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.changed = threading.Condition()
        """Guards what follows; notified with everything that may end a wait."""
        self._sending = threading.Lock()
        """Held while a frame is written. Never taken while the other lock is held."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, frames.ToTrainer] = {}
        self._rooms: set[int] = set()
        self.ended: str | None = None
        """Why nothing can be asked any more; None while it can."""
        try:
            self._socket.settimeout(WELCOME_S)
            self._socket.connect(path)
            hello = frames.Hello(slot=slot, incarnation=incarnation)
            self._socket.sendall(frames.encode(hello))
            self.fd, size = receive_arena(self._socket)
            self._socket.settimeout(None)
        except (OSError, RemoteProtocolError):
            self._socket.close()
            raise
        self.arena = memoryview(mmap.mmap(self.fd, size))
        self._thread = threading.Thread(target=self._read, name="segments", daemon=True)
        self._thread.start()

    def end(self, why: str) -> None:
        """End every wait and all later requests; the store hears of it by the hanging up."""
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()

    def hang_up_if_done(self) -> None:
        """Hang up if this side has ended and no room is open."""
        with self.changed:
            if self.ended is None or self._rooms:
                return
        # Only the reader closes the socket: its number must not be reused under a blocked call.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def next_number(self) -> int:
        """Return the number of a new request."""
        with self.changed:
            return next(self._numbers)

    def open_room(self) -> int:
        """Return the number of a request for room. Until it is closed the store hears of no end.

        Raises:
            StoreGone: the store cannot be asked.
        """
        with self.changed:
            number = next(self._numbers)
            self._raise_if_ended()
            self._rooms.add(number)
            return number

    def close_room(self, number: int) -> None:
        """Note that nothing is written into a room any more."""
        with self.changed:
            self._rooms.discard(number)
        self.hang_up_if_done()

    def ask(self, number: int, message: frames.FromTrainer) -> frames.ToTrainer:
        """Send a request and wait for its answer.

        Raises:
            StoreGone: there will be none.
        """
        self.send(message)
        return self.answer_to(number)

    def answer_to(self, number: int) -> frames.ToTrainer:
        """Wait for the answer to a request that was sent.

        Raises:
            StoreGone: there will be none.
        """
        with self.changed:
            self.changed.wait_for(lambda: number in self._answers or self.ended is not None)
            if number in self._answers:
                return self._answers.pop(number)
            raise StoreGone(str(self.ended))

    def send(self, message: frames.FromTrainer) -> None:
        """Send a message.

        Raises:
            StoreGone: the store cannot be asked.
        """
        with self.changed:
            self._raise_if_ended()
        try:
            with self._sending:
                self._socket.sendall(frames.encode(message))
        except OSError as error:
            with self.changed:
                self._raise_if_ended()
            raise StoreGone(f"the pod's store of segments: {error}") from error

    def _raise_if_ended(self) -> None:
        if self.ended is not None:
            raise StoreGone(self.ended)

    # What follows runs in the reader thread.

    def _read(self) -> None:
        why = "the pod's store of segments has ended"
        try:
            parser = FrameParser(max_body=0)
            while data := self._socket.recv(READ_BYTES):
                self._take([frames.decode_to_trainer(f.head) for f in parser.feed(data)])
        except (OSError, RemoteProtocolError) as error:
            why = f"the pod's store of segments: {error}"
        finally:
            self.end(why)
            with self._sending:
                self._socket.close()

    def _take(self, messages: Sequence[frames.ToTrainer]) -> None:
        """Take what has come together, and wake those who wait once for all of it."""
        with self.changed:
            for message in messages:
                if isinstance(message, frames.Held):
                    self._note_held(message)
                elif not isinstance(message, frames.Arena):
                    self._answers[message.request] = message
            self.changed.notify_all()
