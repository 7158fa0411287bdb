"""What an object store's client is told: by the recipe and by the environment; no secrets."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import from_url

from paceline.durable.errors import UserError
from paceline.durable.s3_requests import S3Bucket
from paceline.masking import names_secret

_CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only",
     "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes",
     "proxy_url", "randomize_addresses", "root_certificate", "timeout", "user_agent"}
)  # fmt: skip
_CONNECT_TIMEOUT = timedelta(seconds=10)
# Few, so that the caller learns of an outage within minutes and decides.
_RETRIES: Any = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=120),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
}


def check_options(options: Mapping[str, str]) -> None:
    """Raise UserError for an option that names a secret: recipes are copied, shown and kept."""
    for name in options:
        if names_secret(name):
            raise UserError(
                f"store option {name!r}: secrets do not belong into a recipe. Set it in the "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and so on), or use the role "
                "of the machine."
            )


def open_client(url: str, options: Mapping[str, str], timeout: timedelta) -> Any:
    """Open the client of a url; `timeout` holds for one request where no option says otherwise.

    Raises UserError for a url or an option that it does not understand.
    """
    check_options(options)
    parts = urlsplit(url)
    if parts.password is not None:
        raise UserError(
            f"{parts.scheme}://{parts.hostname}: secrets do not belong into a url, but into the "
            "environment."
        )
    config: Any = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    client: Any = {"timeout": timeout, "connect_timeout": _CONNECT_TIMEOUT}
    if parts.scheme == "s3":
        config.setdefault("checksum_algorithm", "CRC64NVME")
        endpoint = _endpoint(options)
        server = urlsplit(endpoint)
        # The client would panic at its first request, past every handler.
        if endpoint and not (server.scheme in ("http", "https") and server.hostname):
            raise UserError(f"store option 'endpoint': {endpoint!r} is not `https://host[:port]`")
        if server.scheme == "http":
            client["allow_http"] = True
    client.update({name: value for name, value in options.items() if name in _CLIENT_OPTIONS})
    try:
        return from_url(url, config=config, client_options=client, retry_config=_RETRIES)
    except (exceptions.BaseError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"{url}: {reason} Look at url and `store_options`.") from error


def s3_bucket(url: str, options: Mapping[str, str]) -> S3Bucket | None:
    """Where signed requests for this store go; None where it is not S3."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return None
    return S3Bucket(
        parts.netloc,
        endpoint=_endpoint(options),
        region=_setting(options, "region", "default_region") or "us-east-1",
        virtual_hosted=_setting(options, "virtual_hosted_style_request").lower() in ("true", "1"),
    )


def _endpoint(options: Mapping[str, str]) -> str:
    found = _setting(options, "endpoint_url_s3", "endpoint", "endpoint_url")
    return found.rstrip("/")


def _setting(options: Mapping[str, str], *names: str) -> str:
    for name in names:
        for given in (options.get(name), options.get(f"aws_{name}")):
            if given:
                return given
    # The names that every client of S3 reads; ours asks for what obstore will use.
    return next(filter(None, (os.environ.get(f"AWS_{name.upper()}") for name in names)), "")
