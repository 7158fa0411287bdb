"""One server over HTTP: requests out, replies in, and no exception for what a network does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from paceline.target.served.replies import (
    Failed,
    Rejected,
    Reply,
    Unusable,
    models_of,
    outcome_of,
)

_LONGEST_BODY = 64 << 20
_CONNECT_SECONDS = 30.0
_MODELS_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as it is put to a server."""

    key: str
    """Names it to whoever asked."""
    route: str
    """`/completions` or `/chat/completions`."""
    fields: dict[str, Any]
    """The request's JSON, without `model`."""
    is_repeated: bool = False
    """Asked again for what came of it before: the same once more says nothing of the server."""


class _TooLong(Exception):
    pass


@dataclass(frozen=True)
class Client:
    """Speaks to one endpoint; the session is shared."""

    session: aiohttp.ClientSession
    url: str
    """Without a slash at its end; routes are appended as they are."""
    timeout: float
    """Seconds from the request's beginning to the last byte of its answer."""
    key: str = field(default="", repr=False)
    """Sent as bearer token; empty sends none."""

    async def models(self) -> tuple[str, ...] | Unusable | Failed:
        """What the server calls the models it has."""
        answer = await self._request("GET", "/models", None, min(self.timeout, _MODELS_SECONDS))
        if isinstance(answer, Failed):
            return answer
        found = models_of(*answer)
        if isinstance(found, Unusable) and answer[0] == 404:
            return Unusable(
                f"{found.message}. There is no `{self.url}/models`: most servers have their API "
                "under `/v1`"
            )
        return found

    async def ask(self, question: Question, model: str) -> Reply | Rejected | Unusable | Failed:
        """One answer."""
        body = msgspec.json.encode({"model": model, **question.fields})
        answer = await self._request("POST", question.route, body, self.timeout)
        return answer if isinstance(answer, Failed) else outcome_of(*answer)

    async def _request(
        self, method: str, route: str, body: bytes | None, seconds: float
    ) -> tuple[int, Mapping[str, str], bytes] | Failed:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _CONNECT_SECONDS))
        try:
            async with self.session.request(
                method,
                self.url + route,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                return response.status, response.headers, await _body(response)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            return Failed("connect", f"cannot be reached ({_words(error)})")
        except TimeoutError:
            return Failed("timeout", f"no answer within {seconds:g} s")
        except aiohttp.ClientPayloadError as error:
            return Failed("cut", f"an answer was cut off ({_words(error)})")
        except _TooLong:
            return Failed("malformed", f"an answer of more than {_LONGEST_BODY >> 20} MiB")
        except (aiohttp.ClientError, OSError) as error:
            return Failed("disconnected", f"the connection broke ({_words(error)})")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _LONGEST_BODY:
            raise _TooLong
        parts.append(part)
    return b"".join(parts)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
