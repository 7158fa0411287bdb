"""What the object-store client raises, in words: who said what, and what to do."""

import re

from obstore import exceptions

from paceline.durable.errors import StoreFailed

_FINAL_STATUS = frozenset({400, 401, 403, 404, 405, 410, 411, 413, 416, 501})
_PASSING_CODES = frozenset(
    {"BadDigest", "IncompleteBody", "InternalError", "NoSuchUpload", "OperationAborted",
     "RequestTimeout", "ServiceUnavailable", "SlowDown", "XAmzContentChecksumMismatch",
     "XAmzContentSHA256Mismatch"}
)  # fmt: skip

_CREDENTIALS = (
    "Look at the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_SESSION_TOKEN, or those of Google and Azure) or at the role of this machine."
)
_RIGHTS = f"These credentials lack the right to it, or are the wrong ones. {_CREDENTIALS}"
_ADVICE_BY_CODE = {
    "AccessDenied": f"These credentials lack the right to it. {_CREDENTIALS}",
    "ExpiredToken": f"The session has expired: renew it. {_CREDENTIALS}",
    "InvalidAccessKeyId": f"The store does not know this access key. {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"The secret does not belong to the access key. {_CREDENTIALS}",
    "NoSuchBucket": "Create the bucket, or correct its name.",
    "PermanentRedirect": "The bucket is in another region: set the option `region`.",
    "AuthorizationHeaderMalformed": "Set the option `region` to the bucket's.",
    "RequestTimeTooSkewed": "Set the clock of this machine.",
    "SlowDown": "The store asks for fewer requests; a smaller `extract.uploads` makes fewer.",
    "EntityTooLarge": "Make smaller shards (`extract.shard_bytes`).",
}
_UNREACHABLE = "Look at the network and at the option `endpoint`."
_NO_CREDENTIALS = f"No credentials were found, nor a role of this machine. {_CREDENTIALS}"
_AGAIN = "The same call may succeed later."
_INSTANCE_METADATA = "169.254.169.254"


def refusal_code(error: Exception) -> str:
    """The store's own name for a refusal, such as `NoSuchBucket`; empty without one."""
    found = re.search(r"<Code>([^<]*)</Code>|\(code: (\w+)\)", str(error))
    return (found[1] or found[2]) if found else ""


def is_unknown(error: BaseException | None) -> bool:
    """Whether the server does not know what it was asked to do."""
    return isinstance(error, exceptions.NotSupportedError) or _status(str(error)) == 501


def store_failed(error: Exception, place: str, doing: str) -> StoreFailed:
    """The failure in words: `place` is the store's url, `doing` names operation and key."""
    text = str(error)
    code = refusal_code(error)
    status = _status(text)
    said = _what_was_said(text, code, status)
    transient = _is_transient(error, text, code, status)
    advice = _ADVICE_BY_CODE.get(code) or _advice(error, text, status, transient)
    kind = "unreached" if _INSTANCE_METADATA in text or "kind: Connect" in text else ""
    if code == "AccessDenied" or advice == _RIGHTS:
        kind = "denied"
    message = f"{place}: {doing}: {said}. {advice}"
    return StoreFailed(message, transient, advice=advice, kind=kind)


def _status(text: str) -> int | None:
    found = re.search(r"status code: (\d{3})", text)
    return int(found[1]) if found else None


def _is_transient(error: Exception, text: str, code: str, status: int | None) -> bool:
    if code in _PASSING_CODES:
        return True
    if code in _ADVICE_BY_CODE or _INSTANCE_METADATA in text or "BadScheme" in text:
        return False
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return False
    if isinstance(error, FileNotFoundError | exceptions.NotSupportedError):
        return False
    return status not in _FINAL_STATUS


def _advice(error: Exception, text: str, status: int | None, transient: bool) -> str:
    if _INSTANCE_METADATA in text:
        return _NO_CREDENTIALS
    if status in (401, 403) or isinstance(error, exceptions.PermissionDeniedError):
        return _RIGHTS
    if "BadScheme" in text:
        return "Set the option `allow_http` to `true` for a store without TLS."
    if "kind: Connect" in text or "kind: Timeout" in text:
        return _UNREACHABLE
    return _AGAIN if transient else "The store will not do this, however often it is asked."


def _what_was_said(text: str, code: str, status: int | None) -> str:
    if _INSTANCE_METADATA in text:
        return "the store was not asked"
    message = re.search(r"<Message>([^<]*)</Message>", text)
    parts = [f"HTTP {status}" if status else "", code, message[1].rstrip(".") if message else ""]
    if any(parts):
        return "the store says " + " ".join(part for part in parts if part)
    # The first line names the operation alone; the reason stands in the nested source.
    reasons = re.findall(r'(?:message|error): "((?:[^"\\]|\\.)*)"', text)
    if "TimedOut" in text or "kind: Timeout" in text:
        reasons = ["no answer in time"]
    server = re.search(r"https?://[^/\s,]+", text)
    reason = reasons[-1] if reasons else re.sub(r"^Generic \w+ error: ", "", text.split("\n", 1)[0])
    return f"{server[0]}: {reason}" if server and server[0] not in reason else reason
