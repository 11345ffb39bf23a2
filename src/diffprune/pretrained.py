"""How a `PrunedVLM` goes to a folder or the hub, and comes back."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from diffprune.loading import brought_models, may_be_on_hub, require_name, require_revision
from diffprune.ops.arguments import checked_methods
from diffprune.results import Row
from diffprune.saved_pruners import load_pruned_vlm
from diffprune.saving import describe, exported_state, save_pruner


@checked_methods("save_pretrained", "push_to_hub")
class SavedPruner:
    """The part of `PrunedVLM` that saves and loads."""

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        base_id: str | None = None,
        notes: str = "",
        card_rows: Sequence[Row] | None = None,
    ) -> None:
        """Write the pruner (never the base model, never the throttler) with what it needs to be loaded safely.

        Args:
            base_id: The name to load the base model by; default: the one it was loaded by.
            notes: Kept in the config.
            card_rows: Measured rows (`read_results(path).rows`) for the table of the model card.
        """
        require_name(directory)
        method: Any = self.method  # type: ignore[attr-defined]
        config = describe(self, base_id=base_id, notes=notes)
        save_pruner(directory, state=exported_state(method.state_dict()), config=config, card_rows=card_rows)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        keep: int | float | None = None,
        method: str | None = None,
        base: nn.Module | None = None,
        processor: Any = None,
        allow_other_base: bool = False,
        revision: str | None = None,
        base_revision: str | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """A saved pruner on its base model: a local folder or a hub id; see `diffprune.loading`.

        Args:
            method: Another method that takes its weights (`diffprune-diverse` those of `diffprune`, and back); default:
                what its `choice` says.
            revision: Branch, tag or commit of the pruner's repository on the hub.
            base_revision: The same of its base model; default: the one it was trained on.
            model_kwargs: Go to the base model's `from_pretrained`: dtype, device_map, ...; `token` and `cache_dir` are
                used for the pruner as well.
        """
        return load_pruned_vlm(
            cls,  # type: ignore[arg-type]
            directory,
            keep=keep,
            method=method,
            base=base,
            processor=processor,
            allow_other_base=allow_other_base,
            revision=revision,
            base_revision=base_revision,
            model_kwargs=model_kwargs,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        base_id: str | None = None,
        card_rows: Sequence[Row] | None = None,
        revision: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the pruner as `save_pretrained` does and upload it to the hub; what the hub tells of the commit.

        Args:
            repo_id: `owner/name`; the repository is made where there is none.
            base_id: The hub id of the base model, where it was loaded from a folder.
            revision: A branch to upload to, made where there is none; default: main.
            private: Whether a repository that is made is private; default: as the owner's others.
            token: Of the hub; default: the one of `hf auth login`.
            kwargs: Of the client's `upload_folder`: commit_message, create_pr, ...
        """
        from huggingface_hub import HfApi

        require_revision(revision)
        if not may_be_on_hub(repo_id):
            raise ValueError(f"{repo_id!r} is no name of a repository; give owner/name")
        with tempfile.TemporaryDirectory() as folder:
            method: Any = self.method  # type: ignore[attr-defined]
            config = describe(self, base_id=base_id)
            refuse_unshared(config["base"]["id"])
            state = exported_state(method.state_dict())
            save_pruner(folder, state=state, config=config, card_rows=card_rows, name=repo_id)
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, **kwargs)


def refuse_unshared(base_id: str) -> None:
    """An error where a pruner would be shared whose base model others cannot load by the name it has here."""
    if base_id in brought_models() or (may_be_on_hub(base_id) and not Path(base_id).is_dir()):
        return
    named = f"the base model is {base_id}, a name of this machine" if base_id else "the base model has no name"
    raise ValueError(f"{named}: others could not load the pruner; give its hub id, push_to_hub(..., base_id=...)")
