"""From a url to a store, and what is refused on the way."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.durable.errors import UserError
from paceline.durable.object_store import ObjectStore
from paceline.durable.open_store import is_local, local_path, open_store
from paceline.durable.s3_requests import S3Bucket
from paceline.durable.store import LocalStore, MemoryStore


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri(), "a b"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        store.put("x", url.encode())
        assert (tmp_path / "a b" / "x").read_bytes() == url.encode()
        assert is_local(url)
        assert local_path(url).absolute() == tmp_path / "a b"
    assert open_store("/", {}).url == "file:///"


def test_memory():
    assert isinstance(open_store("memory:"), MemoryStore)
    assert not is_local("memory:")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_object_stores(scheme):
    store = open_store(f"{scheme}://bucket/a/prefix/")
    assert isinstance(store, ObjectStore)
    assert store.url == f"{scheme}://bucket/a/prefix"
    assert store.prefix == "a/prefix/"
    assert not is_local(store.url)
    assert open_store(f"{scheme}://bucket").url == f"{scheme}://bucket"


def test_azure_takes_its_account_from_the_environment(monkeypatch):
    with pytest.raises(UserError, match="Account must be specified"):
        open_store("az://container/prefix")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    assert open_store("az://container/prefix").url == "az://container/prefix"


@pytest.mark.parametrize(
    "name",
    [
        "secret_access_key",
        "credentials_file",
        "aws_access_key_id",
        "session_token",
        "Password",
        "azure_storage_sas_key",
    ],
)
@pytest.mark.parametrize("url", ["s3://bucket/prefix", "folder"])
def test_secrets_are_refused_and_not_repeated(name, url):
    with pytest.raises(UserError, match=f"'{name}': secrets .* environment") as caught:
        open_store(url, {name: "hush"})
    assert "hush" not in str(caught.value)


def test_the_name_of_a_key_that_the_server_holds_is_no_secret():
    options = {"aws_sse_kms_key_id": "arn:aws:kms:us-east-1:1:key/2", "region": "us-east-1"}
    assert open_store("s3://bucket", options).url == "s3://bucket"


def test_secrets_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(UserError, match=r"s3://bucket: secrets .* environment") as caught:
        open_store("s3://someone:hush@bucket/prefix")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://host/x", "no store of this kind"),
        ("http://host/x", "no store of this kind"),
        ("s3:///x", "names no bucket"),
        ("file://host/x", "file:///absolute"),
        ("", "not a folder"),
    ],
)
def test_urls_that_name_no_store(url, told):
    with pytest.raises(UserError, match=told):
        open_store(url)


def test_options_of_a_folder_are_refused():
    with pytest.raises(UserError, match="only object stores have options, not region"):
        open_store("folder", {"region": "x"})


@pytest.mark.parametrize(
    ("options", "environment", "bucket"),
    [
        ({}, {}, S3Bucket("b")),
        ({"region": "eu-x-1"}, {"AWS_REGION": "eu-y-1"}, S3Bucket("b", region="eu-x-1")),
        ({}, {"AWS_REGION": "eu-y-1"}, S3Bucket("b", region="eu-y-1")),
        ({}, {"AWS_DEFAULT_REGION": "eu-y-1"}, S3Bucket("b", region="eu-y-1")),
        (
            {"aws_endpoint": "http://a:1/"},
            {"AWS_ENDPOINT_URL": "http://b:1"},
            S3Bucket("b", endpoint="http://a:1"),
        ),
        ({}, {"AWS_ENDPOINT_URL": "http://b:1"}, S3Bucket("b", endpoint="http://b:1")),
        ({"virtual_hosted_style_request": "true"}, {}, S3Bucket("b", virtual_hosted=True)),
    ],
)
def test_requests_of_ours_go_where_the_client_goes(options, environment, bucket, monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://b/p", options)
    assert isinstance(store, ObjectStore)
    assert store.bucket == bucket


@pytest.mark.parametrize(
    ("bucket", "address"),
    [
        (S3Bucket("b"), ("https", "s3.us-east-1.amazonaws.com", "/b/k%20x/y")),
        (
            S3Bucket("b", virtual_hosted=True),
            ("https", "b.s3.us-east-1.amazonaws.com", "/k%20x/y"),
        ),
        (
            S3Bucket("b", endpoint="https://b.host", virtual_hosted=True),
            ("https", "b.host", "/k%20x/y"),
        ),
        (S3Bucket("b", endpoint="http://host:1/base"), ("http", "host:1", "/base/b/k%20x/y")),
    ],
)
def test_addresses_of_buckets(bucket, address):
    assert bucket._target("k x/y") == address


def test_stores_know_no_torch():
    code = "import sys, paceline.durable.open_store, paceline.durable.s3_admin; print('torch' in sys.modules)"  # noqa: E501
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.strip() == "False", done.stderr
