"""The names of what a job has in a cluster beside its pods."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.job.object_names import account_names, jobs_of_account, object_name
from mainstay_core.job.types import JOB_NAME

JOB_NAMES = st.from_regex(rf"\A{JOB_NAME.pattern}\Z").filter(lambda name: len(name) <= 40)
UIDS = st.uuids(version=4).map(str)


@given(JOB_NAMES, UIDS)
def test_a_name_is_no_job_s_own_and_a_valid_one_of_a_service(name: str, uid: str) -> None:
    made = object_name(name, uid)

    assert made != name
    assert len(made) <= 63
    assert made.startswith(f"mtj-{name}-")


@given(JOB_NAMES, UIDS)
def test_a_job_is_found_by_each_of_its_accounts(name: str, uid: str) -> None:
    for account in account_names(name, uid):
        assert name in jobs_of_account(account)


def test_jobs_of_one_name_that_come_one_after_the_other_share_no_name() -> None:
    made = {object_name("demo", str(uuid.uuid4())) for _ in range(100)}

    assert len(made) == 100


def test_names_for_people_to_recognize() -> None:
    uid = "0f3a9c21-7d55-4c1e-9a70-1f0d2b6e8c11"

    assert object_name("demo", uid) == "mtj-demo-0f3a9c21"
    assert account_names("demo", uid) == ("mtj-demo-0f3a9c21", "demo")
    assert jobs_of_account("mtj-a-b-0f3a9c21") == ("a-b", "mtj-a-b-0f3a9c21")
    assert jobs_of_account("default") == ("default",)
