"""What vLLM's front end does with the pictures of a request: placeholders are cut to the budget before anything runs.

Imported by vLLM's own processes alone, through `vllm_model`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.model_executor.models.transformers.multimodal import (  # pyright: ignore[reportMissingImports]
    MultiModalProcessingInfo,
    MultiModalProcessor,
)
from vllm.multimodal.inputs import MultiModalFieldConfig  # pyright: ignore[reportMissingImports]
from vllm.multimodal.processing import (  # pyright: ignore[reportMissingImports]
    PromptReplacement,
    PromptUpdateDetails,
)

from diffprune.backbones.processors import pixel_seed
from diffprune.fitting import refuse_full_budget, require_family
from diffprune.integrations.vllm_settings import Settings, deployed_name, rounding_of, served_settings
from diffprune.types import Budget

KEEP = "keep"  # of a request's mm_processor_kwargs
FIELD = "diffprune_picture"  # of each picture: KEPT, FULL, and what the encoder is not told otherwise
KEPT, FULL, WIDTH, HEIGHT, SEED = range(5)


class PicturesInfo(MultiModalProcessingInfo):
    """What vLLM asks before it sees a picture; memory is reserved for all of its tokens, as a request may keep all."""

    @cached_property
    def settings(self) -> Settings:
        return served_settings(self.get_hf_config(), uses_mrope=self.ctx.model_config.uses_mrope)

    @cached_property
    def rounding(self) -> str:
        return rounding_of(self.settings)

    @cached_property
    def chooses(self) -> bool:
        return deployed_name(self.settings) != "full"

    @cached_property
    def image_token(self) -> int:
        return int(self.get_hf_config().image_token_id)

    def budget(self, keep: Any) -> Budget:
        """Of a request; the engine's own where it says nothing."""
        if keep is None:
            keep = self.settings.keep
        elif not self.chooses:
            refuse_full_budget(keep)
        return Budget(1.0 if keep is None else keep, self.rounding)

    def newlines(self, size: tuple[int, int]) -> int:
        """Placeholders without picture content of a picture of (width, height)."""
        config = self.get_hf_config()
        return require_family(config.model_type).num_newlines(config, size)

    def _get_supported_modalities(self) -> list[str]:
        """Pictures; asked at the start, so what cannot be served is refused here, before an engine process begins."""
        assert self.settings
        return ["image"]

    def _get_num_mm_tokens(self, **sizes: Any) -> Any:
        given = self.ctx.model_config.get_multimodal_config().mm_processor_kwargs or {}
        return self.get_hf_processor()._get_num_multimodal_tokens(**sizes, **without_keep(given))


class PicturesProcessor(MultiModalProcessor):
    """vLLM's own processing, with fewer placeholders for each picture."""

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        out = super()._apply_hf_processor_main(mm_items, without_keep(hf_kwargs))
        sizes = out.get("image_replacement_sizes")
        if sizes is None:
            return out
        budget = self.info.budget(hf_kwargs.get(KEEP))
        runs, rows = [], []
        for item, ids in enumerate(out["image_replacement_ids"].split(sizes.tolist())):
            size = mm_items["image"].get_image_size(item)
            visual = ids == self.info.image_token
            full = int(visual.sum())
            newlines = self.info.newlines((size.width, size.height))
            kept = budget.count(full - newlines)
            kept += newlines if self.info.settings.newline == "all" else 0
            runs.append(ids[~visual | (visual.cumsum(0) <= kept)])
            rows.append([kept, full, size.width, size.height, seed_of(mm_items["image"].get(item))])
        out["image_replacement_ids"] = torch.cat(runs)
        out["image_replacement_sizes"] = torch.tensor([len(run) for run in runs])
        out[FIELD] = torch.tensor(rows)
        return out

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> Any:
        own = hf_inputs.pop(FIELD, None)
        fields = dict(super()._get_mm_fields_config(hf_inputs, without_keep(hf_processor_mm_kwargs)))
        if own is not None:
            hf_inputs[FIELD] = own
            fields[FIELD] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return fields

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        """As vLLM's own, which takes the most frequent token for the one that holds embeddings: not so with K = 1."""
        items = out_mm_kwargs.get("image", ())
        replacements = [item.pop("image_replacement_ids").data.tolist() for item in items]
        if not replacements:
            return []
        target = self.info.get_hf_processor(**without_keep(hf_processor_mm_kwargs)).image_token
        token = (
            self.info.get_tokenizer().encode(target, add_special_tokens=False) if isinstance(target, str) else target
        )
        return [
            PromptReplacement(
                modality="image",
                target=[token] if isinstance(token, int) else list(token),
                replacement=lambda item: PromptUpdateDetails.select_token_id(replacements[item], self.info.image_token),
            )
        ]


def without_keep(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What the stock processor takes of a request's arguments."""
    return {key: value for key, value in kwargs.items() if key != KEEP}


def seed_of(picture: Any) -> int:
    """What is drawn at random for a picture is drawn from its pixels, as everywhere here."""
    if isinstance(picture, Image.Image):
        return pixel_seed(picture.convert("RGB"))
    return pixel_seed(np.ascontiguousarray(np.asarray(picture)))
