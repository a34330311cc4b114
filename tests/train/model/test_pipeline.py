"""Which stages a job has, and what of them is in the fingerprint."""

import logging

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_train.comm.mesh import SINGLE
from mainstay_train.model import pipeline, workload

SMALL = {"dim": 16, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}


def identify(layers, stages, order=Order.SWAPPED, cut=Cut.EQUAL):
    shape = JobShape(
        lanes=1,
        shards_per_lane=1,
        replicas=1,
        min_replicas=1,
        stages=stages,
        steps=1,
        seed=0,
        order=order,
        cut=cut,
    )
    return pipeline.identify(workload.load("", {**SMALL, "layers": layers}), shape, SINGLE)


def test_the_fingerprint_has_the_stages_of_a_swapped_pipeline_alone():
    assert identify(4, 2, Order.IN_ORDER, Cut.BALANCED) == {}
    assert identify(4, 2, Order.IN_ORDER, Cut.EQUAL) == {}
    assert identify(4, 2) == {"pipeline": "Swapped, stages of 3, 3 blocks"}
    assert identify(5, 5) == {"pipeline": "Swapped, stages of 2, 1, 1, 1, 2 blocks"}


def test_twins_that_are_not_alike_are_refused_with_what_would_be_right():
    with pytest.raises(InvalidSpecError, match="swap with 4 or 6 layers of one kind") as refused:
        identify(5, 2)
    assert refused.value.field == "spec.pipeline.order"
    with pytest.raises(InvalidSpecError, match="stages is 8 but the model has 6 blocks"):
        identify(4, 8)


def test_what_an_equal_cut_costs_is_told(caplog):
    with caplog.at_level(logging.INFO):
        identify(5, 2, Order.IN_ORDER, Cut.EQUAL)
    assert "the dearest one costs" in caplog.text
