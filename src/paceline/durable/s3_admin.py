"""What the owner of a bucket should know: uploads that were never ended, and who removes them."""

from http.client import HTTPException

from paceline.durable.errors import StoreFailed
from paceline.durable.object_store import ObjectStore
from paceline.durable.s3_requests import S3Bucket, Unfinished
from paceline.durable.store import Store

_NO_RULES = ("NoSuchLifecycleConfiguration",)


def multipart_uploads(store: Store) -> list[Unfinished]:
    """Uploads below the store's prefix that were begun and not ended, by key; [] without S3.

    Those of uploads at work are among them. Raises StoreFailed where the server does not tell.
    """
    bucket = _bucket(store)
    if bucket is None:
        return []
    try:
        return sorted(bucket.unfinished(_prefix(store)), key=lambda upload: upload.key)
    except (OSError, HTTPException, ValueError, RuntimeError) as error:
        raise StoreFailed(
            f"{store.url}: listing unfinished uploads: {error}.", transient=True
        ) from error


def has_abort_rule(store: Store) -> bool | None:
    """Whether the bucket itself removes unfinished uploads below the prefix after some days.

    None where the service has no such rules, does not tell, or is not S3: Google and Azure remove
    them by themselves or by rules that have no common interface.
    """
    bucket = _bucket(store)
    if bucket is None:
        return None
    try:
        answer = bucket.request("GET", query={"lifecycle": ""})
        root = answer.xml()
    except (OSError, HTTPException, ValueError, RuntimeError):
        return None
    if answer.status != 200:
        return False if root.findtext("Code") in _NO_RULES else None
    prefix = _prefix(store)
    return any(
        rule.findtext("Status") == "Enabled"
        and rule.find("AbortIncompleteMultipartUpload") is not None
        and rule.find("Filter/Tag") is None
        and prefix.startswith(rule.findtext("Filter/Prefix") or rule.findtext("Prefix") or "")
        for rule in root.iter("Rule")
    )


def _bucket(store: Store) -> S3Bucket | None:
    return store.bucket if isinstance(store, ObjectStore) else None


def _prefix(store: Store) -> str:
    return store.prefix if isinstance(store, ObjectStore) else ""
