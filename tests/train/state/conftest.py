"""Servers of states are closed after the test that began them, with their threads and sockets."""

import pytest

from mainstay_train.state.heal import HealServer


@pytest.fixture(autouse=True)
def closed_servers(monkeypatch):
    begun, begin = [], HealServer.__init__

    def note(server, *args, **options):
        begin(server, *args, **options)
        begun.append(server)

    monkeypatch.setattr(HealServer, "__init__", note)
    yield
    for server in begun:
        server.close()
