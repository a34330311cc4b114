import socket

from mainstay_train.base import network_cut


def _cut(pipe):
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    network_cut.begin(3600.0)
    pipe.send(ours.recv(1))  # the end of the connection
    try:
        network_cut.refuse()
    except OSError as error:
        pipe.send(str(error))
    # What comes up meanwhile, whoever opens it, does not stay up.
    late = socket.create_connection(listener.getsockname())
    pipe.send(late.recv(1))
    theirs.close()


def test_a_cut_ends_connections_of_now_and_of_later_and_refuses_our_own(crew):
    # In a process of its own: everything of it is cut.
    child = crew.fork(_cut)
    assert child.hear() == b""
    assert child.hear() == "the network is cut"
    assert child.hear() == b""


def test_nothing_is_refused_without_a_cut():
    network_cut.refuse()
    assert not network_cut.is_cut()
