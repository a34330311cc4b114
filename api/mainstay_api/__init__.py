"""The api: orders facts, commits plans with compare-and-set, publishes, answers people.

Stateless: any replica serves any request. All decisions are mainstay_core's; all
state is Redis's (:mod:`mainstay_api.store`). Training goes on, unrepaired, while it
is down.
"""
