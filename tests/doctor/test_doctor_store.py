"""Permissions of a real S3 server, tried with a probe object that is always removed."""

import json
import time

import pytest

from doctor_worlds import only, world_of
from paceline.doctor.checks import store as check_store
from paceline.durable.errors import StoreFailed
from paceline.durable.object_store import ObjectStore
from paceline.durable.s3_admin import multipart_uploads
from paceline.durable.s3_requests import S3Bucket
from paceline.recipe.schema import ExtractRecipe
from seaweed import BUCKET, READER, REGION
from tiny_run import tiny_project


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_project(tmp_path_factory.mktemp("store"))


def check(recipe, url, options, **given):
    overrides = [f"extract.store={url}", f"extract.store_options={json.dumps(dict(options))}"]
    return list(check_store.check(world_of(recipe, *overrides, **given)))


def keys(s3, prefix):
    return [found.key for found in ObjectStore(s3.url(prefix), s3.options).list("")]


def test_an_owner_may_do_everything_and_nothing_is_left(recipe, s3):
    with s3.credentials():
        found = check(recipe, s3.url("doctor"), s3.options)
        assert keys(s3, "doctor") == []
    assert not only(found, "error")
    assert found[0].what.endswith("a probe object was written, read, listed and deleted")


def test_read_only_credentials_are_an_error_that_names_the_permission(recipe, s3):
    with s3.credentials(READER):
        found = check(recipe, s3.url("doctor"), s3.options)
    [error] = only(found, "error")
    assert error.what.startswith("write is refused: ")
    assert error.mend.startswith(f"allow s3:PutObject on arn:aws:s3:::{BUCKET}/doctor/*")
    with s3.credentials():
        assert keys(s3, "doctor") == []


def test_a_bucket_that_is_not_there_is_an_error(recipe, s3):
    with s3.credentials():
        found = check(recipe, "s3://no-such-bucket/x", s3.options)
    [error] = found
    assert error.what.startswith("write failed: s3://no-such-bucket/x: putting ")
    assert error.what.count("no-such-bucket") == error.what.count("NoSuchBucket") == 1
    assert error.mend == "Create the bucket, or correct its name"


def test_a_server_that_is_not_there_is_no_matter_of_rights(recipe, s3):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        with s3.credentials():
            found = check(
                recipe,
                "s3://bucket/x",
                {"endpoint": endpoint, "region": REGION},
                seconds=60.0,
            )
    [error] = found
    assert error.what.startswith("write failed: s3://bucket/x: ")
    assert error.what.endswith(f"{endpoint}: Connection refused.")
    assert error.mend == "Look at the network and at the option `endpoint`"


def test_uploads_that_cannot_be_listed_are_told_once_and_in_words(s3):
    with s3.credentials(), pytest.raises(StoreFailed) as caught:
        multipart_uploads(ObjectStore("s3://no-such-bucket/x", s3.options))
    assert str(caught.value).startswith(
        "s3://no-such-bucket/x: listing unfinished uploads: the store says HTTP 404 NoSuchBucket"
    )
    assert "<" not in str(caught.value)


def test_a_server_that_never_answers_is_a_finding_within_the_limit(recipe, s3):
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        started = time.monotonic()
        with s3.credentials():
            found = check(
                recipe, "s3://bucket/x", {"endpoint": endpoint, "region": REGION}, seconds=0.5
            )
        assert time.monotonic() - started < 5
    [error] = only(found, "error")
    assert error.what == "s3://bucket/x does not answer to write within 0.5 s"
    [note] = only(found, "note")
    assert "may have been left there" in note.what
    key = note.what.split()[0].removeprefix("s3://bucket/")
    assert note.mend == (
        f"aws --endpoint-url {endpoint} s3api delete-object --bucket bucket --key {key}"
    )


def test_a_bucket_without_an_abort_rule_is_a_warning_and_the_command_makes_one(recipe, s3):
    with s3.credentials():
        found = check(recipe, s3.url("ruled"), s3.options)
        [warning] = only(found, "warning")
        assert "no rule that aborts unfinished multipart uploads" in warning.what
        assert warning.mend.startswith(f"aws --endpoint-url {s3.endpoint} s3api put-bucket-life")
        rule = json.loads(
            warning.mend.partition("--lifecycle-configuration '")[2].partition("'")[0]
        )
        assert rule["Rules"][0]["Filter"] == {"Prefix": "ruled"}


def test_unfinished_uploads_are_named_with_the_command_that_ends_them(recipe, s3):
    with s3.credentials():
        bucket = S3Bucket(BUCKET, endpoint=s3.endpoint, region=REGION)
        begun = bucket.request("POST", "killed/unit-000001.safetensors", {"uploads": ""})
        upload = begun.xml().findtext("UploadId", "")
        try:
            found = check(recipe, s3.url("killed"), s3.options)
        finally:
            bucket.abort(bucket.unfinished("killed"))
        after = check(recipe, s3.url("killed"), s3.options)
    [warning] = [f for f in only(found, "warning") if "begun and not ended" in f.what]
    assert "killed/unit-000001.safetensors" in warning.what
    assert f"--upload-id {upload}" in warning.mend
    assert not [f for f in after if "begun and not ended" in f.what]


def test_a_folder_needs_no_probe(recipe):
    [found] = check_store.check(world_of(recipe))
    assert found.severity == "ok"


def probe(store):
    return list(check_store._probe(store, ExtractRecipe(store=store.url), 5.0))


class Refusing:
    """A store that refuses some operations, or lies; for what no real server can be told to do."""

    url = "s3://bucket/x"

    def __init__(self, *, refuses=(), lies=False):
        from paceline.durable.store import MemoryStore

        self.inner, self._refuses, self._lies = MemoryStore(), refuses, lies

    def _may(self, what):
        if what in self._refuses:
            raise StoreFailed(f"{self.url}: {what}: forbidden.", transient=False, kind="denied")

    def put(self, key, source):
        self._may("put")
        return self.inner.put(key, source)

    def get_range(self, key, start, end):
        self._may("get")
        return b"?" * (end - start) if self._lies else self.inner.get_range(key, start, end)

    def list(self, prefix, after=""):
        self._may("list")
        return self.inner.list(prefix, after)

    def delete(self, names):
        self._may("delete")
        self.inner.delete(names)


@pytest.mark.parametrize(
    ("refuses", "severity", "start"),
    [
        ("get", "error", "allow s3:GetObject on arn:aws:s3:::bucket/x/*"),
        ("list", "error", "allow s3:ListBucket on arn:aws:s3:::bucket,"),
        ("delete", "warning", "allow s3:DeleteObject on arn:aws:s3:::bucket/x/*"),
    ],
)
def test_each_permission_is_tried_and_the_probe_removed(refuses, severity, start):
    store = Refusing(refuses=(refuses,))
    [found] = probe(store)
    assert found.severity == severity
    assert found.mend.startswith(start)
    assert len(list(store.inner.list(""))) == (refuses == "delete")


def test_a_store_that_gives_other_bytes_is_an_error():
    store = Refusing(lies=True)
    [found] = probe(store)
    assert "other bytes than were written" in found.what
    assert not list(store.inner.list(""))
