"""Signed S3 requests for what the object-store client has no call for: unfinished uploads, rules.

Credentials are those of the environment, a profile or the instance, found by the AWS runtime.
"""

import http.client
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from io import BytesIO
from urllib.parse import quote, urlsplit

from awscrt.auth import (
    AwsCredentialsProvider,
    AwsSignedBodyHeaderType,
    AwsSigningConfig,
    aws_sign_request,
)
from awscrt.exceptions import AwsCrtError
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import InputStream

_TIMEOUT = 30.0
_LATER = (408, 425, 429)


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    status: int
    """HTTP status."""

    body: bytes
    """All of it."""

    def xml(self) -> ET.Element:
        """The body, namespaces stripped. Raises ValueError where it is not XML."""
        try:
            root = ET.fromstring(self.body)
        except ET.ParseError as error:
            raise ValueError(f"the answer is not XML: {self.body[:200]!r}") from error
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    @property
    def refusal(self) -> str:
        """What a status other than success says, in words."""
        try:
            root = self.xml()
        except ValueError:
            return f"the store says HTTP {self.status}"
        words = (root.findtext("Code", ""), root.findtext("Message", "").rstrip("."))
        return " ".join(filter(None, (f"the store says HTTP {self.status}", *words)))

    def error(self, doing: str = "") -> OSError:
        """The refusal as an exception; a PermissionError where the same request has no prospect."""
        final = 400 <= self.status < 500 and self.status not in _LATER
        kind = PermissionError if final else OSError
        return kind(f"{doing}{self.refusal}")


@dataclass(frozen=True)
class Unfinished:
    """A multipart upload that was begun and neither completed nor aborted: hidden, and billed."""

    key: str
    """In the bucket, prefix included."""

    upload_id: str
    """The server's name for it."""

    initiated: str
    """When it began, as the server writes it (ISO 8601)."""


@dataclass(frozen=True)
class S3Bucket:
    """A bucket and how its server is reached."""

    name: str
    """Of the bucket."""

    endpoint: str = ""
    """`http(s)://host[:port]`; AWS itself where empty."""

    region: str = "us-east-1"
    """It goes into the signature."""

    virtual_hosted: bool = False
    """The bucket is part of the host's name; else it is the first part of the path."""

    def request(
        self, method: str, key: str = "", query: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """Send a signed request and read the answer, whatever its status.

        Raises OSError or http.client.HTTPException without an answer, RuntimeError without
        credentials.
        """
        scheme, host, path = self._target(key)
        if query:
            pairs = (f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in query.items())
            path += "?" + "&".join(pairs)
        headers = self._signed(method, host, path, body)
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, timeout=_TIMEOUT)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        finally:
            connection.close()

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Uploads under keys that begin with `prefix`. Raises as `request`, and `Answer.error`."""
        marker: dict[str, str] = {}
        while True:
            answer = self.request("GET", query={"uploads": "", "prefix": prefix, **marker})
            if answer.status != 200:
                raise answer.error()
            root = answer.xml()
            for upload in root.iter("Upload"):
                key = upload.findtext("Key", "")
                if key.startswith(prefix):
                    yield Unfinished(
                        key, upload.findtext("UploadId", ""), upload.findtext("Initiated", "")
                    )
            if root.findtext("IsTruncated") != "true":
                return
            marker = {
                "key-marker": root.findtext("NextKeyMarker", ""),
                "upload-id-marker": root.findtext("NextUploadIdMarker", ""),
            }

    def abort(self, uploads: Iterable[Unfinished]) -> None:
        """End unfinished uploads and free their parts; those that are gone are fine."""
        for upload in uploads:
            answer = self.request("DELETE", upload.key, {"uploadId": upload.upload_id})
            if answer.status not in (200, 204, 404):
                raise answer.error(f"{upload.key}: aborting: ")

    def sweep(
        self, key: str, waits: Iterable[float], call: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Abort all uploads of a key; what the server does not let us stays, and nothing is raised.

        Args:
            key: in the bucket, prefix included.
            waits: seconds before each try; further ones are made where the server is away or says
                that it is at fault, as one that is starting does.
            call: what the requests of a try are made in.

        """
        for wait in waits:
            time.sleep(wait)
            try:
                with call():
                    left = list(self.unfinished(key))
                    self.abort(upload for upload in left if upload.key == key)
            except (TimeoutError, PermissionError, ValueError, RuntimeError):
                return  # the bucket's own rule is for what stays
            except (OSError, HTTPException):
                continue
            return

    def _target(self, key: str) -> tuple[str, str, str]:
        endpoint = self.endpoint or f"https://s3.{self.region}.amazonaws.com"
        parts = urlsplit(endpoint)
        path = parts.path.rstrip("/")
        host = parts.netloc
        if self.virtual_hosted:
            host = host if host.startswith(f"{self.name}.") else f"{self.name}.{host}"
        else:
            path += f"/{self.name}"
        return parts.scheme, host, f"{path}/{quote(key, safe='/-_.~')}" if key else path or "/"

    def _signed(self, method: str, host: str, path: str, body: bytes) -> dict[str, str]:
        headers = HttpHeaders([("host", host)])
        request = HttpRequest(method, path, headers, InputStream(BytesIO(body)) if body else None)
        config = AwsSigningConfig(
            credentials_provider=self._credentials,
            region=self.region,
            service="s3",
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_header_type=AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        try:
            return dict(aws_sign_request(request, config).result(timeout=_TIMEOUT).headers)
        except AwsCrtError as error:
            raise RuntimeError(f"no credentials to sign with ({error.name})") from error

    @cached_property
    def _credentials(self) -> AwsCredentialsProvider:
        # Kept, as it keeps what it once was given by the machine's metadata service.
        return AwsCredentialsProvider.new_default_chain()
