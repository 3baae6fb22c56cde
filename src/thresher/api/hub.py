"""Upload of a model directory to the Hugging Face Hub, with a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher import __version__
from thresher.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


def upload(
    directory: Path, repo_id: str, *, message: str, token: str | None, private: bool | None, revision: str | None
) -> CommitInfo:
    """Create the repository unless it exists, and commit the files of a directory to it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi(token=token)
    try:
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        return api.upload_folder(repo_id=name, folder_path=directory, commit_message=message, revision=revision)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(
            f"{directory} cannot be uploaded to {repo_id}: {error}; log in with `hf auth login`, or give "
            "DPOConfig(hub_token=..., hub_model_id=...)"
        ) from error


def model_card(name: str, facts: Mapping[str, Any], **metadata: Any) -> str:
    """Write the text of a model card. facts: shown as a table. metadata: of the card's header, unless None."""
    from huggingface_hub import ModelCardData

    given = {key: value for key, value in metadata.items() if value is not None}
    header = ModelCardData(library_name="transformers", model_name=name, **given).to_yaml()
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items())
    return (
        f"---\n{header}\n---\n\n# {name}\n\nTrained on preference pairs with thresher {__version__}.\n\n"
        f"| | |\n|---|---|\n{rows}\n"
    )


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
