"""The api: orders facts, stores plans with compare-and-set, publishes them, answers people.

Stateless: any replica serves any request. All decisions are mainstay_core's; all
state is Redis's (:mod:`mainstay_api.store`). Training goes on, unrepaired, while it
is down.
"""
