"""Defines the commands of ``mainstay`` and of ``kubectl mainstay``.

- ``main``: the command line of ``mainstay``
- ``kubectl``: the command line of ``kubectl mainstay``
- ``arguments``: arguments that several commands have
- ``local``: ``mainstay local``
- ``demo``: ``mainstay local demo``
- ``status``: ``mainstay status``
- ``timeline``: ``mainstay timeline``
- ``run_report``: ``kubectl mainstay report``
- ``operations``: ``mainstay scale``, ``drain``, ``suspend`` and ``resume``
- ``faults``: ``mainstay faults``
- ``checkpoints``: ``mainstay checkpoints``
- ``snapshot_copies``: ``mainstay snapshots ls`` and ``verify``
- ``snapshots``: ``mainstay snapshots``
- ``findings``: ``mainstay findings``
- ``lineage``: ``mainstay lineage`` and ``approximate``
- ``dmr``: ``mainstay dmr``
- ``chaos``: ``mainstay chaos``
- ``simulate``: ``mainstay sim``
"""
