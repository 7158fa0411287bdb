"""Object stores against a real server, and against one whose answers are not true."""

import os
import pickle
from collections.abc import Iterator
from urllib.parse import unquote

import obstore
import pytest

from fault_proxy import (
    FaultProxy,
    answer,
    cut_answer,
    fault_proxy,
    first,
    lose_answer,
    slow_down,
    stall,
)
from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.errors import IntegrityError, StoreFailed, UserError
from paceline.durable.object_store import CREATE_LIMIT, ObjectStore
from paceline.durable.pieces import part_size, pieces
from paceline.durable.s3_admin import has_abort_rule, multipart_uploads
from paceline.durable.s3_requests import S3Bucket
from paceline.durable.seen import Seen
from paceline.durable.store import Listed, MemoryStore, Stat
from seaweed import BUCKET, READER, Seaweed
from torture_uploads import PART, uploads_while_the_server_is_killed, uploads_with_resets

SMALL = bytes(range(256)) * 50
LARGE = os.urandom(64 << 10) * 160 + b"end"
STAT = Stat(len(LARGE), crc64(LARGE))


def open_at(s3: Seaweed, name: str, **options: str) -> ObjectStore:
    return ObjectStore(s3.url(name), {**s3.options, **options}, part_size=PART)


@pytest.fixture
def store(s3, tmp_path) -> Iterator[ObjectStore]:
    """Straight to the server."""
    with s3.credentials():
        yield open_at(s3, tmp_path.name)


@pytest.fixture
def proxy(s3) -> Iterator[FaultProxy]:
    with fault_proxy(s3.port) as running:
        yield running


@pytest.fixture
def through(s3, store, proxy, tmp_path) -> ObjectStore:
    """The same objects, through the proxy."""
    return open_at(s3, tmp_path.name, endpoint=proxy.endpoint, timeout="2s")


def test_a_large_file_goes_up_in_parts_and_leaves_none_behind(through, store, proxy, tmp_path):
    file = tmp_path / "staged"
    file.write_bytes(LARGE)
    assert through.put("folder/unit-1", file) == STAT == store.head("folder/unit-1")
    assert sum(request.is_part for request in proxy.seen) == 3
    assert store.get_range("folder/unit-1", PART - 3, PART + 3) == LARGE[PART - 3 : PART + 3]
    assert store.get_range("folder/unit-1", 0, len(LARGE)) == LARGE
    assert multipart_uploads(store) == []
    assert list(store.list("")) == [Listed("folder/unit-1", len(LARGE))]


def test_the_server_is_given_a_checksum_of_every_part(through, proxy):
    through.put("x", LARGE)
    through.put("small", SMALL)
    sent = [r for r in proxy.seen if r.is_part or r.is_whole_put]
    assert len(sent) == 4
    assert all(request.header("x-amz-checksum-crc64nvme") for request in sent)


@pytest.mark.parametrize("where", [0, PART, len(LARGE) - 1])
def test_a_file_that_changed_since_its_checksum_is_never_completed(store, tmp_path, where):
    store.put("x", b"old")
    file = tmp_path / "staged"
    changed = bytearray(LARGE)
    changed[where] ^= 1
    file.write_bytes(changed)
    with pytest.raises(IntegrityError, match=r"staged: promised were .* have changed since"):
        store.put("x", file, crc64(LARGE))
    assert store.get_range("x", 0, 3) == b"old"
    assert multipart_uploads(store) == []


def test_a_missing_file_is_no_fault_of_the_store(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        store.put("x", tmp_path / "absent")


def test_no_object_needs_more_than_ten_thousand_parts():
    for size in (0, 1, PART, 10_000 * PART, 10_000 * PART + 1, 5 << 40):
        part = part_size(size, PART)
        assert part >= PART
        assert part * 10_000 >= size
    assert part_size(10_000 * PART, PART) == PART


def test_pieces_hold_one_part_in_memory_at_a_time(tmp_path):
    file = tmp_path / "staged"
    file.write_bytes(LARGE)
    cut = list(pieces(file, STAT, PART))
    assert [len(piece) for piece in cut] == [PART, PART, len(LARGE) - 2 * PART]
    assert b"".join(cut) == LARGE


def keep(store: ObjectStore, share: float):
    """A server that keeps the beginning of what it is given, and says that all is well."""

    def rule(request, forward):
        data = request.body[: int(len(request.body) * share)]
        key = unquote(request.key).removeprefix(store.prefix)
        # Straight through the client: our own put would not stand for it.
        attributes = {"crc64": request.header("x-amz-meta-crc64")}
        obstore.put(store._client, key, data, attributes=attributes)
        return answer(200, "OK", b"")

    return rule


def completed(request, forward):
    """The upload is said to be complete, and is not."""
    done = b"<CompleteMultipartUploadResult><ETag>x-2</ETag></CompleteMultipartUploadResult>"
    return answer(200, "OK", done)


def error_in_200(request, forward):
    error = b"<Error><Code>InternalError</Code><Message>Please try again.</Message></Error>"
    return answer(200, "OK", error)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9999])
def test_t_50_an_object_that_is_empty_or_short_is_put_again(through, store, proxy, share):
    proxy.rule = first(1, lambda r: r.is_whole_put, keep(store, share))
    assert through.put("x", SMALL) == store.head("x") == Stat(len(SMALL), crc64(SMALL))
    assert store.get_range("x", 0, len(SMALL)) == SMALL
    assert sum(request.is_whole_put for request in proxy.seen) == 2


@pytest.mark.parametrize("lie", [completed, error_in_200])
def test_t_50_a_completion_that_is_none_is_put_again(through, store, proxy, lie):
    proxy.rule = first(1, lambda r: r.is_complete, lie)
    assert through.put("x", LARGE) == store.head("x") == STAT
    assert store.get_range("x", 0, len(LARGE)) == LARGE
    assert multipart_uploads(store) == []


def test_t_50_what_a_store_never_keeps_is_never_accepted(through, store, proxy):
    proxy.rule = first(100, lambda r: r.is_whole_put, keep(store, 0.5))
    with pytest.raises(IntegrityError, match=r"x was put 3 times with 12800 bytes .* 6400 bytes"):
        through.put("x", SMALL)
    proxy.rule = first(100, lambda r: r.is_complete, completed)
    with pytest.raises(IntegrityError, match=r"y was put 3 times .* has nothing"):
        through.put("y", LARGE)
    proxy.rule = first(100, lambda r: r.is_complete, error_in_200)
    with pytest.raises(StoreFailed, match=r"putting z: .*InternalError") as caught:
        through.put("z", LARGE)
    assert caught.value.transient
    assert multipart_uploads(store) == []


LOST = {
    "beginning": lambda r: r.method == "POST" and r.query.startswith("uploads"),
    "a part": lambda r: r.is_part,
    "completion": lambda r: r.is_complete,
}


@pytest.mark.parametrize("which", LOST)
def test_a_lost_answer_of_an_upload_costs_nothing_and_leaves_nothing(through, store, proxy, which):
    proxy.rule = first(1, LOST[which], lose_answer)
    assert through.put("x", LARGE) == store.head("x") == STAT
    assert multipart_uploads(store) == []


@pytest.mark.parametrize("away", [lose_answer, slow_down, cut_answer])
def test_a_put_that_went_through_waits_for_the_server_to_end_what_it_left(
    through, store, proxy, away
):
    listing = first(5, lambda r: r.method == "GET" and r.query.startswith("uploads"), away)
    losing = first(1, LOST["beginning"], lose_answer)
    proxy.rule = lambda request, forward: losing(request, lambda r: listing(r, forward))
    assert through.put("x", LARGE) == store.head("x") == STAT
    assert multipart_uploads(store) == []


def test_a_server_that_does_not_let_us_look_for_what_is_left_costs_no_wait(through, store, proxy):
    refusal = b"<Error><Code>AccessDenied</Code></Error>"
    asked = []

    def rule(request, forward):
        if not request.query.startswith("uploads") or request.method != "GET":
            return forward(request)
        asked.append(request)
        return answer(403, "Forbidden", refusal)

    proxy.rule = rule
    assert through.put("x", LARGE) == store.head("x") == STAT
    assert len(asked) == 1


def test_a_put_that_has_sent_nothing_has_nothing_to_end(through, proxy):
    proxy.rule = first(1000, lambda r: r.method == "HEAD", slow_down)
    with pytest.raises(StoreFailed):
        through.put("x", LARGE)
    assert {r.method for r in proxy.seen} == {"HEAD"}


def test_an_upload_said_to_be_gone_was_completed_by_our_first_try(through, store, proxy):
    gone = answer(404, "Not Found", b"<Error><Code>NoSuchUpload</Code></Error>")
    done = []

    def rule(request, forward):
        if not request.is_complete:
            return forward(request)
        if done:
            return gone
        done.append(1)
        return lose_answer(request, forward)

    proxy.rule = rule
    assert through.put("x", LARGE) == store.head("x") == STAT


def test_a_conflict_over_our_own_write_is_success(through, store, proxy):
    def conflict(request, forward):
        forward(request)
        return answer(409, "Conflict", b"<Error><Code>OperationAborted</Code></Error>")

    proxy.rule = first(1, lambda r: r.is_whole_put, conflict)
    assert through.put("x", SMALL) == store.head("x")


def test_a_create_whose_answer_is_lost_is_success(through, store, proxy):
    proxy.rule = first(1, lambda r: r.is_whole_put, lose_answer)
    assert through.create("x", SMALL) == store.head("x") == Stat(len(SMALL), crc64(SMALL))
    assert through.create("x", SMALL) == store.head("x")
    # Some proxies ask the server again by themselves: its answer is to the second request.
    proxy.rule = first(1, lambda r: r.is_whole_put, lambda r, f: f(r) and f(r))
    assert through.create("y", SMALL) == store.head("y") == Stat(len(SMALL), crc64(SMALL))


def test_a_create_never_replaces(store):
    store.create("x", SMALL)
    with pytest.raises(IntegrityError, match=r"x is there with 12800 bytes .* Another writer"):
        store.create("x", b"other")
    assert store.get_range("x", 0, len(SMALL)) == SMALL


def test_a_refused_create_without_anything_there_is_tried_again(through, store, proxy):
    conflict = answer(409, "Conflict", b"<Error><Code>ConditionalRequestConflict</Code></Error>")
    proxy.rule = first(1, lambda r: r.is_whole_put, lambda r, f: conflict)
    assert through.create("x", SMALL) == store.head("x")
    proxy.rule = first(100, lambda r: r.is_whole_put, lambda r, f: conflict)
    with pytest.raises(StoreFailed, match=r"creating y: .*ConditionalRequestConflict") as caught:
        through.create("y", SMALL)
    assert caught.value.transient
    assert store.head("y") is None


def test_a_create_is_one_request_and_bounded(store, tmp_path):
    file = tmp_path / "sparse"
    with file.open("wb") as handle:
        handle.truncate(CREATE_LIMIT + 1)
    with pytest.raises(ValueError, match="too many for one request"):
        store.create("x", file, 0)


@pytest.mark.parametrize("before", [None, b"damaged"])
@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_a_slow_put_replaces_nothing_that_came_meanwhile(through, store, proxy, data, before):
    """Where several machines make the same object, the first that stands is kept."""
    theirs = bytes(len(data))
    if before is not None:
        store.put("x", before)

    def overtaken(request, forward):
        store.put("x", theirs)
        return forward(request)

    proxy.rule = first(1, lambda r: r.is_whole_put or r.is_part, overtaken)
    with pytest.raises(StoreFailed, match=r"another writer|NoSuchUpload") as told:
        through.put("x", data)
    assert told.value.transient
    assert store.head("x") == Stat(len(theirs), crc64(theirs))
    assert multipart_uploads(store) == []


def test_an_object_that_goes_away_meanwhile_is_put_all_the_same(through, store, proxy):
    store.put("x", b"old")

    def removed(request, forward):
        store.delete(["x"])
        return forward(request)

    proxy.rule = first(1, lambda r: r.is_whole_put, removed)
    assert through.put("x", SMALL) == store.head("x")


def test_a_server_without_conditions_is_put_to_without(through, store, proxy):
    def refuse(request, forward):
        if request.header("if-none-match") or request.header("if-match"):
            code = b"<Error><Code>NotImplemented</Code><Message>no such header</Message></Error>"
            return answer(501, "Not Implemented", code)
        return forward(request)

    proxy.rule = refuse
    for data in (SMALL, SMALL[:100]):
        assert through.put("x", data) == store.head("x")


def test_slow_down_is_waited_for_and_then_told(through, store, proxy):
    proxy.rule = first(2, lambda r: r.is_whole_put, slow_down)
    through.put("x", SMALL)
    proxy.rule = first(100, lambda r: r.is_whole_put, slow_down)
    with pytest.raises(
        StoreFailed, match=r"putting y: .* 503 SlowDown .* fewer requests"
    ) as caught:
        through.put("y", SMALL)
    assert caught.value.transient


def test_a_stalled_request_is_made_again(through, store, proxy):
    proxy.rule = first(1, lambda r: r.is_part, stall(4))
    assert through.put("x", LARGE) == store.head("x")


def test_a_short_answer_is_never_handed_on(through, store, proxy):
    store.put("x", SMALL)
    proxy.rule = first(1, lambda r: r.method == "GET", cut_answer)
    assert through.get_range("x", 0, len(SMALL)) == SMALL

    def shortened(request, forward):
        """Whole in itself, and less than was asked for."""
        return answer(200, "OK", SMALL[:100])

    for lie in (cut_answer, shortened):
        proxy.rule = first(100, lambda r: r.method == "GET", lie)
        with pytest.raises(StoreFailed, match="reading x"):
            through.get_range("x", 0, len(SMALL))


def test_an_object_of_other_tools_is_read_for_its_checksum(store):
    obstore.put(store._client, "foreign", SMALL)
    assert store.head("foreign") == Stat(len(SMALL), crc64(SMALL))
    obstore.put(store._client, "strange", SMALL, attributes={"crc64": "no number"})
    assert store.head("strange") == Stat(len(SMALL), crc64(SMALL))


def test_names_that_are_no_keys_of_ours_are_not_listed(store):
    store.put("unit-1", b"1")
    obstore.put(store._client, "a b", b"foreign")
    obstore.put(store._client, "x.partial", b"foreign")
    assert list(store.list("")) == [Listed("unit-1", 1)]


def test_prefixes_are_of_strings_and_stores_do_not_see_each_other(s3, store, tmp_path):
    for number in range(12):
        store.put(f"unit-{number}", b"1")
    other = open_at(s3, tmp_path.name + "-more")
    other.put("unit-1", b"12")
    assert [found.key for found in store.list("unit-1")] == ["unit-1", "unit-10", "unit-11"]
    assert [found.size for found in store.list("", after="unit-8")] == [1]
    assert list(other.list("")) == [Listed("unit-1", 2)]


def test_a_pickle_opens_the_same_store(store):
    store.put("x", SMALL)
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert again.head("x") == store.head("x")


def test_a_wrong_secret_is_told_as_one(s3):
    with s3.credentials({"AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": "wrong"}):
        store = open_at(s3, "x")
        for call in (
            lambda: store.put("x", SMALL),
            lambda: store.put("x", LARGE),
            lambda: list(store.list("")),
            lambda: store.get_range("x", 0, 1),
        ):
            with pytest.raises(
                StoreFailed, match=r"SignatureDoesNotMatch .*AWS_SECRET_ACC"
            ) as told:
                call()
            assert not told.value.transient
            assert str(told.value).startswith(f"{store.url}: ")
        with pytest.raises(StoreFailed, match=r"asking for x: .* 403.*credentials"):
            store.head("x")


def test_missing_rights_are_told(s3, store):
    store.put("x", SMALL)
    with s3.credentials(READER):
        reader = pickle.loads(pickle.dumps(store))
        assert reader.get_range("x", 0, 3) == SMALL[:3]
        for call in (lambda: reader.put("x", b"1"), lambda: reader.delete(["x"])):
            with pytest.raises(StoreFailed, match=r"x: .*AccessDenied.*lack the right") as caught:
                call()
            assert not caught.value.transient
    assert store.get_range("x", 0, 3) == SMALL[:3]


def test_a_missing_bucket_is_told(s3):
    with s3.credentials():
        store = ObjectStore("s3://no-such-bucket/x", s3.options, part_size=PART)
        for call in (
            lambda: store.put("x", SMALL),
            lambda: store.put("x", LARGE),
            lambda: list(store.list("")),
        ):
            with pytest.raises(StoreFailed, match=r"NoSuchBucket.*Create the bucket") as caught:
                call()
            assert not caught.value.transient


def test_a_server_that_is_not_there_is_told_and_may_come_back(s3):
    with fault_proxy(s3.port) as gone:
        pass
    with s3.credentials():
        store = open_at(s3, "x", endpoint=gone.endpoint)
        with pytest.raises(StoreFailed, match=rf"{gone.endpoint}: Connection refused") as caught:
            store.put("x", SMALL)
    assert caught.value.transient


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"endpoint": "nonsense"}, "endpoint"),
        ({"endpoint": "https://"}, "endpoint"),
        ({"endpoint": "http://"}, "endpoint"),
        ({"regoin": "x"}, "regoin"),
        ({"timeout": "soon"}, "soon"),
        ({"aws_secret_access_key": "x"}, "environment"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, told):
    with pytest.raises(UserError, match=told):
        ObjectStore("s3://bucket/prefix", options)


def test_unfinished_uploads_are_listed_and_aborted(s3, store):
    bucket = store.bucket
    assert bucket == S3Bucket(BUCKET, endpoint=s3.endpoint, region="us-east-1")
    for key in ("unit-1", "unit-2", "unit-10"):
        assert bucket.request("POST", f"{store.prefix}{key}", {"uploads": ""}).status == 200
    left = multipart_uploads(store)
    assert [upload.key for upload in left] == [
        f"{store.prefix}{key}" for key in ("unit-1", "unit-10", "unit-2")
    ]
    # A put of the key removes what a killed one of it had left, and nothing else.
    store.put("unit-1", LARGE)
    assert [upload.key.rpartition("/")[2] for upload in multipart_uploads(store)] == [
        "unit-10",
        "unit-2",
    ]
    bucket.abort(left)
    assert multipart_uploads(store) == []
    assert multipart_uploads(MemoryStore()) == []


def test_the_rule_that_removes_unfinished_uploads(s3, store):
    bucket = store.bucket

    def set_rule(body: str) -> None:
        rule = f"<LifecycleConfiguration><Rule><ID>x</ID>{body}</Rule></LifecycleConfiguration>"
        answered = bucket.request("PUT", query={"lifecycle": ""}, body=rule.encode())
        assert answered.status == 200

    abort = "<AbortIncompleteMultipartUpload><DaysAfterInitiation>3</DaysAfterInitiation></AbortIncompleteMultipartUpload>"  # noqa: E501
    whole = "<Filter><Prefix></Prefix></Filter>"
    mine = f"<Filter><Prefix>{store.prefix}</Prefix></Filter>"
    expire = "<Expiration><Days>9</Days></Expiration>"
    enabled, disabled = "<Status>Enabled</Status>", "<Status>Disabled</Status>"
    try:
        assert has_abort_rule(store) is False
        for rule, expected in (
            (enabled + whole + abort, True),
            (enabled + mine + abort, True),
            (enabled + "<Filter><Prefix>elsewhere/</Prefix></Filter>" + abort, False),
            (disabled + whole + abort, False),
            (enabled + whole + expire, False),
        ):
            set_rule(rule)
            assert has_abort_rule(store) is expected, rule
    finally:
        bucket.request("DELETE", query={"lifecycle": ""})
    assert has_abort_rule(MemoryStore()) is None
    with s3.credentials({"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "x"}):
        assert has_abort_rule(pickle.loads(pickle.dumps(store))) is None


def test_uploads_over_a_line_that_breaks_are_all_verified(s3):
    with s3.credentials():
        outcome = uploads_with_resets(s3, 20, seed=4)
    assert outcome.verified == 20
    assert outcome.unfinished == 0
    assert outcome.resets >= 20


def test_no_acknowledged_object_is_missing_after_kills_of_the_server(s3):
    with s3.credentials():
        assert uploads_while_the_server_is_killed(s3, 2, seed=1) >= 10


def test_without_the_check_afterwards_a_short_object_would_pass(through, store, proxy, monkeypatch):
    """A sabotaged build: the tests above can see the fault that they are there for."""
    honest = ObjectStore._see
    monkeypatch.setattr(
        ObjectStore, "_see", lambda self, key: Seen(len(SMALL), crc64(SMALL), "", "")
    )
    proxy.rule = first(1, lambda r: r.is_whole_put, keep(store, 0.5))
    through.put("x", SMALL)
    monkeypatch.setattr(ObjectStore, "_see", honest)
    seen = store._see("x")
    assert seen is not None
    assert seen.size == len(SMALL) // 2
    assert crc64_hex(seen.crc64 or 0) == crc64_hex(crc64(SMALL))
