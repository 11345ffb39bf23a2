"""How a `PrunedVLM` goes to a folder or the hub, and comes back."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from diffprune.loading import require_name
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
        **model_kwargs: Any,
    ) -> Any:
        """A saved pruner on its base model: a local folder or a hub id; see `diffprune.loading`.

        Args:
            method: Another method that takes its weights (`diffprune-diverse` those of `diffprune`, and back); default:
                what its `choice` says.
        """
        return load_pruned_vlm(
            cls,  # type: ignore[arg-type]
            directory,
            keep=keep,
            method=method,
            base=base,
            processor=processor,
            allow_other_base=allow_other_base,
            model_kwargs=model_kwargs,
        )

    def push_to_hub(
        self, repo_id: str, *, base_id: str | None = None, card_rows: Sequence[Row] | None = None, **kwargs: Any
    ) -> Any:
        """Save the pruner as `save_pretrained` does and upload it to the hub under `repo_id`."""
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, base_id=base_id, card_rows=card_rows)
            api = HfApi()
            api.create_repo(repo_id, exist_ok=True)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)
