"""Defines the commands of ``mainstay``, one file for each.

- ``main``: the command line
- ``local``: ``mainstay local``
- ``demo``: ``mainstay local demo``
- ``status``: ``mainstay status``
- ``timeline``: ``mainstay timeline``
- ``operations``: ``mainstay scale``, ``drain``, ``suspend`` and ``resume``
- ``faults``: ``mainstay faults``
- ``checkpoints``: ``mainstay checkpoints``
- ``chaos``: ``mainstay chaos``
- ``simulate``: ``mainstay sim``
"""
