"""Upload of an export to the Hugging Face Hub, with the token that `hf auth login` has stored unless one is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


def open_repository(
    name: str, *, token: str | None = None, private: bool | None = None, revision: str | None = None
) -> str:
    """Create a model repository and a branch unless they exist, which needs the right to write; return its full name.

    private: None leaves it to the account, or to the repository that exists.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with _translate_errors(name):
        full_name = api.create_repo(name, private=private, exist_ok=True).repo_id
        if private and not api.model_info(full_name).private:
            raise UserError(
                f"{full_name} exists and is public; make it private in its settings on the Hub, or leave --private out "
                "(hub_private_repo in Python)"
            )
        if revision is not None:
            api.create_branch(full_name, branch=revision, exist_ok=True)
    return full_name


def upload(
    directory: Path,
    name: str,
    files: Sequence[str],
    *,
    message: str,
    token: str | None = None,
    revision: str | None = None,
) -> CommitInfo:
    """Commit files of a directory to a repository that `open_repository` has opened."""
    from huggingface_hub import HfApi

    with _translate_errors(name):
        return HfApi(token=token).upload_folder(
            repo_id=name,
            folder_path=directory,
            allow_patterns=list(files),  # the directory may have other files, which must not be published
            commit_message=message,
            revision=revision,
        )


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    of_http_library: Any = HfHubHTTPError.__bases__  # which one depends on the version of huggingface_hub
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(f"nothing can be uploaded to {name} while HF_HUB_OFFLINE is set; unset it") from error
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a name on the Hugging Face Hub ({error}); write OWNER/NAME") from error
    except HfHubHTTPError as error:
        hint = "log in with `hf auth login`, with a token that may write"
        if error.response.status_code == 403:
            hint = f"the token may not write to {name}; log in with `hf auth login` as its owner, or name another OWNER"
        elif error.response.status_code not in (401, 404):
            hint = "try again, or upload the directory with `hf upload`"
        raise UserError(f"the Hugging Face Hub refuses the upload to {name}: {error}; {hint}") from error
    except ValueError as error:
        hint = "correct README.md, or the arguments that went into it"
        raise UserError(f"the Hugging Face Hub rejects the model card of {name}: {error}; {hint}") from error
    except (*of_http_library, OSError, RuntimeError) as error:  # RuntimeError is of hf_xet
        raise UserError(
            f"the upload to {name} failed: {error}; check the network, then try again, or use `hf upload`"
        ) from error
