"""Servers that run the target: what a recipe may say of them, and what of it decides answers."""

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.schema import RegenerateRecipe

IN_PROCESS = "in-process"
"""Stands for `regenerate.api` where no server is asked; records do not say it."""

_OF_SERVERS = (
    "servers",
    "model",
    "api",
    "server_options",
    "concurrency",
    "timeout",
    "attempts",
    "server_wait",
    "api_key_variable",
)
_DECIDING = ("model", "api", "server_options")
_SET = frozenset(
    {
        "chat_template_kwargs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "prompt",
        "return_token_ids",
        "seed",
        "temperature",
        "tools",
        "top_p",
    }
)
_SECRETS = ("api_key", "authorization", "credential", "password", "secret")
_OF_NO_USE = frozenset({"best_of", "echo", "n", "stop", "stream", "stream_options", "suffix"})


def answering_fields(recipe: RegenerateRecipe) -> Fields:
    """What decides the answers: not which servers give them, nor how patiently they are asked.

    Without servers the same as before there were any.
    """
    fields = {
        key: value
        for key, value in flatten({"regenerate": recipe}).items()
        if key.split(".")[1] not in _OF_SERVERS
    }
    if recipe.servers:
        deciding = {key: getattr(recipe, key) for key in _DECIDING}
        # Groups are a thing of the processes here.
        del fields["regenerate.group_size"]
        fields |= flatten({"regenerate": deciding})
    return fields


def served_problems(recipe: RegenerateRecipe) -> Iterator[str]:
    """Everything impossible in what is said of servers, a sentence each."""
    for number, url in enumerate(recipe.servers):
        problem = _url_problem(url)
        if problem:
            yield f"regenerate.servers.{number}: {problem}"
    for url, times in Counter(url.rstrip("/") for url in recipe.servers).items():
        if times > 1:
            yield f"regenerate.servers: {url} stands there {times} times. Give each server once."
    for name in sorted(recipe.server_options):
        if name in _SET:
            yield (
                f"regenerate.server_options.{name}: set by Paceline itself, from the recipe and "
                "the prompt. Remove it."
            )
        elif name in _OF_NO_USE:
            yield (
                f"regenerate.server_options.{name}: would make of an answer what the target did "
                "not say by itself, or several. Remove it."
            )
        elif any(word in name.lower() for word in _SECRETS):
            yield (
                f"regenerate.server_options.{name}: credentials do not belong into a recipe, which "
                "is copied into every run. Put the servers' key into the environment "
                f"({recipe.api_key_variable or 'regenerate.api_key_variable'})."
            )
    if recipe.server_options and not recipe.servers:
        yield "regenerate.server_options: no server is asked (regenerate.servers is empty)."


def _url_problem(url: str) -> str:
    # Whoever names a login in it must not find that in a log.
    if "@" in url.partition("://")[2].partition("/")[0]:
        return (
            "a url with a login in it. A recipe is copied into every run: put the servers' key "
            "into the environment (regenerate.api_key_variable)."
        )
    return (
        ""
        if _is_address(url)
        else f'"{url}" is no address of a server. Give one such as http://127.0.0.1:8000/v1, the '
        "part before `/completions`."
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        return False
    is_bare = not parts.query and not parts.fragment and not any(map(str.isspace, url))
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port and is_bare
