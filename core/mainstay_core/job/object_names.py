"""Names the objects that a job has in a cluster, beside its pods.

Each name begins with a prefix of ours and carries the job's uid. So no name is that of an object
that others made, and none is that of a deleted job of the same name: a kubelet goes on giving
pods an immutable Secret that it has read under that name.
"""

from __future__ import annotations

import re

PREFIX = "mtj"
UID_DIGITS = 8
"""The first part of a UUID: 32 random bits tell the jobs of one name apart, one after the other.
With a name of 40 characters that makes 53 of the 63 that a Service's name may have."""
_NAME = re.compile(rf"{PREFIX}-(.+)-[^-]{{1,{UID_DIGITS}}}")


def object_name(job: str, uid: str) -> str:
    """Return the name of a job's Service, ServiceAccount, Secret and so on.

    Args:
        job: the job's name.
        uid: its uid.
    """
    return f"{PREFIX}-{job}-{uid[:UID_DIGITS].rstrip('-')}"


def account_names(job: str, uid: str) -> tuple[str, ...]:
    """Return the ServiceAccounts that a job's pods may run as.

    The second is for jobs that an operator of the version before began: it gave the account the
    job's own name.
    """
    return object_name(job, uid), job


def jobs_of_account(account: str) -> tuple[str, ...]:
    """Return the names of the jobs whose pods may run as a ServiceAccount, by its name alone."""
    named = _NAME.fullmatch(account)
    return (account,) if named is None else (named[1], account)
