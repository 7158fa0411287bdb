"""Words in urls and options of stores. Imports no client: whoever reads recipes needs none."""

OBJECT_SCHEMES = ("s3", "gs", "az")
"""Of urls that an object store stands behind, reached over a network."""

_SECRETS = ("secret", "key", "token", "password", "credential")
_NO_SECRETS = ("sse_kms_key_id", "sse_bucket_key_enabled")
"""They say with which key of its own a server encrypts, and hold none."""


def names_secret(option: str) -> bool:
    """Whether a store option's name is that of a credential, which no recipe may hold."""
    name = option.lower()
    return not name.endswith(_NO_SECRETS) and any(word in name for word in _SECRETS)
