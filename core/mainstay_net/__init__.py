"""Listens: lets peers in, within bounds, and has those that must prove the job's secret do so.

- ``acceptor``: accepts connections within bounds, and goes on when descriptors run out
- ``entrance``: an acceptor that hands over only connections that have proved themselves
- ``caller``: the other side of a proof
- ``turns``: runs an acceptor or an entrance in an event loop
- ``http``: bounds the connections of an HTTP server

Every process of ours that listens on TCP does it here, supervisor, trainer, api and operator alike.
What is decided is in :mod:`mainstay_core.base.proofs` and :mod:`mainstay_core.base.admission`.
Nothing but the standard library is needed, as trainers run in the user's image; a trainer has no
event loop and imports neither ``turns`` nor ``http``.
"""
