"""The Hugging Face Hub, asked once and quickly: its own retries take half a minute per file without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from patchproof.models._state import first_line
from patchproof.types import InputError, PatchproofError

ANSWER_WITHIN_SECONDS = 5.0


@contextmanager
def fetching(repo: str) -> Iterator[None]:
    """Inside, files of `repo` come from the Hub, or from the local cache alone if the Hub does not answer.

    Whatever fails inside becomes an InputError that says what could not be fetched and what to do. A few old networks
    of timm are at a plain address (https://…), which is not asked beforehand.
    """
    from huggingface_hub import constants

    online = "://" in repo or answers(repo)
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not online
    try:
        yield
    except PatchproofError:
        raise
    # The Hub's client, its transport and timm's loader each raise kinds of their own, and these change by version.
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        if not isinstance(error, OSError):
            raise InputError(
                f"could not load {repo} as a timm network ({cause}); give another one, or a weight file"
            ) from error
        if not online:
            cause = "the Hugging Face Hub does not answer and the local cache does not hold it"
        raise InputError(
            f"could not fetch {repo}: {cause}; connect to the network, or download the weights elsewhere and give the "
            "path of the file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def answers(repo: str) -> bool:
    """Whether the Hub answers for `repo` at all; InputError where the answer is that there is no such model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    name, _, revision = repo.partition("@")
    try:
        url = hf_hub_url(name, "config.json", revision=revision or None)
        get_hf_file_metadata(url, timeout=ANSWER_WITHIN_SECONDS)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is not a hub id (organisation/name): {first_line(error)}") from error
    except (RepositoryNotFoundError, GatedRepoError) as error:
        raise InputError(
            f"the Hugging Face Hub has no model {repo} open to you; check the name, or run `hf auth login`"
        ) from error
    except EntryNotFoundError:
        return True
    except Exception:  # no name resolution, no route, a proxy's refusal, a timeout, the offline switch
        return False
    return True
