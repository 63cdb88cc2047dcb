"""The Hugging Face Hub for models and data sets alike: where it is, and what to do about a request that failed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PenstockError, SetupError, UnavailableError, UserError


@contextmanager
def explained(repo: str, revision: str, *, named: str, is_data: bool, refusal: type[UserError]) -> Iterator[None]:
    """Translate huggingface_hub's errors into errors with a remedy.

    Args:
        repo: `owner/name`.
        revision: Branch, tag or commit; empty for the main branch.
        named: The setting with its value, which errors begin with.
        is_data: Whether it is a data set, not a model.
        refusal: Error that says that there is none, or none that this account may read.

    Raises:
        UserError: `refusal`, or a SetupError if the Hub refuses this account, HF_HUB_OFFLINE forbids to ask it and the
            cache has no complete copy or may not be read, or the cache cannot be written.
        UnavailableError: the Hub cannot be reached, or has no answer for now; a later start may succeed.
    """
    import httpx
    from huggingface_hub import errors

    name = f"{named} on the Hugging Face Hub"
    kind, here = ("data set", "a file or folder") if is_data else ("model", "a folder")
    try:
        yield
    except errors.GatedRepoError:
        raise refusal(
            f"{name} is gated; accept its terms on its page, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise refusal(
            f"{named} is neither {here} here nor a {kind} on the Hugging Face Hub that this account may read; check "
            "the name, and for a private one run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise refusal(f"{name} has no revision {revision!r}; give a branch, a tag or a commit") from None
    except (httpx.HTTPError, OSError) as error:  # all others of huggingface_hub are one of these
        options = (" --repo-type dataset" if is_data else "") + (f" --revision {revision}" if revision else "")
        raised: type[PenstockError] = UnavailableError if _may_pass(error) else SetupError
        raise raised(f"{name}{_failure(error, f'`hf download {repo}{options}`')}") from None


def endpoint() -> str | None:
    """Return HF_ENDPOINT as it is now; None if it is not set."""
    return os.environ.get("HF_ENDPOINT")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids requests."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


@contextmanager
def offline() -> Iterator[None]:
    """Forbid requests of this process during the context, as HF_HUB_OFFLINE does."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return str(error).partition("\n")[0] or type(error).__name__


def _may_pass(error: Exception) -> bool:
    """Return whether a failed request may succeed later, with nobody's help.

    Args:
        error: As huggingface_hub raised it.
    """
    import httpx
    from huggingface_hub import errors

    cause = _cause_of(error)
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        return status in (408, 429) or status >= 500
    if _is_missing(error):
        return not is_offline()
    return not isinstance(cause, httpx.UnsupportedProtocol) and not _is_of_the_cache(error)


def _is_missing(error: Exception) -> bool:
    """Return whether the cache has no copy, and the Hub was not asked or gave none."""
    from huggingface_hub import errors

    return isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)


def _cause_of(error: Exception) -> BaseException | None:
    """Return the error itself, or that of the look-up which a missing copy came after; None if there was none."""
    return error.__cause__ if _is_missing(error) else error


def _is_of_the_cache(error: Exception) -> bool:
    """Return whether a file cannot be written, as on a full disk."""
    return (
        isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError)
    )


def _closed_cache() -> Path | None:
    """Return the cache, or the folder that it would be in, if this process may not look into it."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    folder = next(each for each in (cache, *cache.parents) if os.path.exists(each))  # nothing in a closed one seems to
    return None if os.access(folder, os.X_OK) else folder


def _failure(error: Exception, fetch: str) -> str:
    """Return why a repository cannot be had, and what to do about it; a name goes before.

    Args:
        error: As huggingface_hub raised it.
        fetch: The command that downloads it.
    """
    import httpx
    from huggingface_hub import constants, errors

    cause = _cause_of(error)
    if isinstance(cause, errors.HfHubHTTPError):
        return _refusal(cause.response.status_code, cause.server_message or "", first_line(cause))
    if _is_missing(error):
        offline = "HF_HUB_OFFLINE is set" if is_offline() else "it cannot be reached"
        if (closed := _closed_cache()) is not None:
            owner = closed.stat().st_uid
            return (
                f": {offline}, and user {os.getuid()} may not read the cache in {closed}; run as its owner, user "
                f"{owner} (containers with PENSTOCK_UID={owner}), or let others in with `chmod a+x {closed}`"
            )
        return f": {offline}, and the cache has no complete copy; fetch it once with {fetch}"
    if _is_of_the_cache(error):
        return (
            f" cannot be kept in the cache: {error}; make room in {constants.HF_HUB_CACHE}, or set HF_HUB_CACHE to "
            "another folder"
        )
    remedy = "try again"
    if isinstance(error, httpx.TransportError):
        remedy = f"look at the network, HF_ENDPOINT and proxies, or run {fetch} where the Hub can be reached"
    return f" could not be fetched: {first_line(error)}; {remedy}"


def _refusal(status: int, said: str, message: str) -> str:
    """Return what the Hub's answer means.

    Args:
        status: Its HTTP status.
        said: Its own words; may be empty.
        message: The first line of huggingface_hub's error.
    """
    shown = f"{status}: {' '.join(said.split())}" if said else str(status)
    if status in (401, 403):
        return (
            f": the Hub did not accept HF_TOKEN or the token of `hf auth login` ({shown}); log in again with "
            "`hf auth login`, or set HF_TOKEN to a token that may read it"
        )
    if status == 429:
        return (
            f": the Hub refuses further requests for now ({shown}); wait some minutes, and set HF_TOKEN, with which "
            "more are allowed"
        )
    if status >= 500:
        return f": the Hub has a fault of its own ({shown}); try again later"
    return f" could not be fetched: {message or shown}; try again"
