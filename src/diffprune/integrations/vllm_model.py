"""The model that vLLM runs: the stock Hugging Face one of its Transformers backend, less the tokens a method drops.

Tower, method and projector are called as everywhere here; nothing of theirs is written again.

Imported by vLLM's own processes alone.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.models.transformers import (  # pyright: ignore[reportMissingImports]
    TransformersMultiModalForCausalLM,
)
from vllm.model_executor.models.transformers.base import Base  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.transformers.multimodal import (  # pyright: ignore[reportMissingImports]
    MultiModalDummyInputsBuilder,
)
from vllm.multimodal import MULTIMODAL_REGISTRY  # pyright: ignore[reportMissingImports]

from diffprune.backbones import splice
from diffprune.backbones.pictures import pieces
from diffprune.backbones.processors import move_features
from diffprune.backbones.prompts import Batch
from diffprune.fingerprint import read_again
from diffprune.fitting import build_for, check_fit, require_family
from diffprune.integrations.vllm import KEY, require_engine
from diffprune.integrations.vllm_pictures import (
    FIELD,
    FULL,
    HEIGHT,
    KEPT,
    SEED,
    WIDTH,
    PicturesInfo,
    PicturesProcessor,
)
from diffprune.integrations.vllm_positions import (
    DIGITS,
    Run,
    first_positions,
    from_channels,
    next_position,
    to_channels,
    with_places,
)
from diffprune.integrations.vllm_settings import Settings, load_served, refuse_family, refuse_method, refuse_rules
from diffprune.loading import describe_processor
from diffprune.saved_pruners import refuse_other_base, saved_method
from diffprune.types import VisualTokens

HOOK = 1e-9  # any rate above zero makes the runner ask for positions once more when the pictures are encoded


@MULTIMODAL_REGISTRY.register_processor(PicturesProcessor, info=PicturesInfo, dummy_inputs=MultiModalDummyInputsBuilder)
class DiffPruneForConditionalGeneration(TransformersMultiModalForCausalLM):
    """A vision-language model of any family that vLLM's Transformers backend runs, with a pruning method before it."""

    supports_multimodal_pruning: ClassVar[bool] = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        require_engine()
        model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
        settings = Settings.read(getattr(model_config.hf_config, KEY, None))
        family = require_family(model_config.hf_config.model_type)
        refuse_family(family)
        refuse_rules(settings, family, num_shards=parallel.tensor_parallel_size, uses_mrope=model_config.uses_mrope)
        revision = {} if model_config.revision is None else {"revision": model_config.revision}
        processor = describe_processor(model_config.model, model_config.hf_config.model_type, **revision)
        saved = None
        if settings.pruner is not None:  # before vLLM changes transformers' classes in this process
            saved = load_served(settings.pruner)[1:]
            if not settings.allow_other_base and vllm_config.load_config.load_format != "dummy":
                refuse_other_base(read_again(family, model_config.model, processor, **revision), saved[0])
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Held so that none of it is a submodule: vLLM loads and lists the weights of its own modules alone.
        inner: Any = SimpleNamespace(model=self.model, config=self.config, dtype=model_config.dtype)
        backbone = family(inner, processor)
        backbone.keeps_newlines = settings.newline
        if saved is None:
            method = build_for(backbone, settings.method or "full", {})
        else:
            method = saved_method(str(settings.pruner), *saved, backbone, settings.method)
        refuse_method(method, method.name)
        check_fit(method, backbone, settings.positions, "global")
        object.__setattr__(self, "backbone", backbone)
        object.__setattr__(self, "method", method.eval().to(vllm_config.device_config.device))
        self.original = settings.positions == "original"
        self.image_token = int(self.config.image_token_id)
        self.num_channels = DIGITS * (1 if backbone.plain_positions else 2)
        self.most_tokens = profiled_tokens(vllm_config)
        if self.original:
            model_config.multimodal_config.video_pruning_rate = HOOK

    # ------------------------------------------------------------------------------------- pictures

    @torch.inference_mode()
    def _process_image_input(self, **kwargs: Any) -> list[Tensor] | None:
        pixels = kwargs.get("pixel_values")
        if pixels is None:
            return None
        about = kwargs.pop(FIELD).view(-1, SEED + 1).tolist()
        features = {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}
        num = len(about)
        ids = torch.zeros(num, 1, dtype=torch.int64)  # the encoder asks for a prompt's place, not for its words
        rule = getattr(self.backbone, "tile_grid", None)
        batch = Batch(
            features=move_features(
                {**features, "input_ids": ids, "attention_mask": torch.ones_like(ids)},
                pixels.device,
                self.model_config.dtype,
            ),
            row_of_image=tuple(range(num)),
            seeds=tuple(picture[SEED] for picture in about),
            tile_grids=None if rule is None else tuple(rule((one[WIDTH], one[HEIGHT])) for one in about),
        )
        out: list[Tensor] = []
        for piece in pieces([picture[FULL] for picture in about], self.most_tokens):
            tokens = self.backbone.encode_some(batch, piece, self.method.needs)
            out += self._embed(tokens, [about[image][KEPT] for image in piece])
        return out

    def _embed(self, tokens: VisualTokens, kept: Sequence[int]) -> list[Tensor]:
        """What stands at the placeholders of each picture, and in further channels where each stood."""
        newlines = tokens.slots is not None and self.backbone.keeps_newlines == "all"
        extra = (tokens.slots == -1).sum(-1) if newlines and tokens.slots is not None else 0
        counts = torch.tensor(kept, device=tokens.x.device) - extra
        chosen = self.method.deploy(tokens, counts)
        visual = self.backbone.project(chosen.x.to(tokens.x.dtype)).flatten(0, 1)
        stays, source = splice.held_slots(
            tokens, chosen.index, newlines=self.backbone.keeps_newlines, rows_of_slots=self.backbone.rows_of_slots
        )
        if newlines:
            visual = torch.cat([visual, self.backbone.newline.to(visual)[None]])  # row -1
        parts = list(visual[source].split(list(kept)))
        if not self.original:
            return parts
        slots = tokens.counts if tokens.slots is None else (tokens.slots != -2).sum(-1)
        places = [part.nonzero() for part in stays.split(slots.tolist())]  # [K, 1] each
        if not self.backbone.plain_positions:
            columns = [grid[1] for grid in tokens.grid]
            places = [torch.cat([one // wide, one % wide], -1) for one, wide in zip(places, columns, strict=True)]
        return [torch.cat([part, to_channels(one).to(part)], -1) for part, one in zip(parts, places, strict=True)]

    # ------------------------------------------------------------------------------------- positions

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Of a prompt that arrives: the family's own numbering of the unpruned one, or counted without gaps."""
        if not self.original:
            return torch.arange(len(input_tokens)).expand(3, -1).clone(), 0
        pictures = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
        runs, grids = [], []
        for feature in pictures:
            first = input_tokens.index(self.image_token, feature.mm_position.offset)
            kept, full = (int(feature.data[FIELD].data.flatten()[which]) for which in (KEPT, FULL))
            runs.append(Run(first, kept, full))
            if "image_grid_thw" in feature.data:
                grids.append(feature.data["image_grid_thw"].data.view(3))

        def number(ids: Tensor) -> Tensor:
            features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            features |= {"image_grid_thw": torch.stack(grids)} if grids else {}
            return self.backbone.positions(Batch(features=features))

        positions = first_positions(input_tokens, runs, self.image_token, number)
        return positions, next_position(positions)

    def recompute_mrope_positions(
        self, input_ids: Any, multimodal_embeddings: Sequence[Tensor], mrope_positions: Tensor, num_computed_tokens: int
    ) -> tuple[list[Tensor], Tensor, int]:
        """The embeddings without their further channels, and the positions these tell of."""
        embeddings = [one[:, : -self.num_channels] for one in multimodal_embeddings]
        if embeddings:
            places = torch.cat([from_channels(one[:, -self.num_channels :]) for one in multimodal_embeddings])
            mrope_positions = with_places(
                mrope_positions,
                torch.as_tensor(input_ids),
                places,
                image_token=self.image_token,
                start=num_computed_tokens,
            )
        return embeddings, mrope_positions, next_position(mrope_positions)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the backend's; where a position is one number, the model is handed the first of the three rows."""
        if positions.ndim == 2 and self.backbone.plain_positions:
            return Base.forward(self, input_ids, positions[0].contiguous(), intermediate_tensors, inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)


def profiled_tokens(vllm_config: Any) -> int:
    """Visual tokens, before pruning, of the pictures that vLLM encodes at once when it measures memory at the start.

    While it runs its scheduler counts what is left after pruning, and would have many more encoded at once.
    """
    info = MULTIMODAL_REGISTRY.get_processing_info(vllm_config.model_config)
    most = info.get_max_image_tokens()
    schedule = vllm_config.scheduler_config
    rules = vllm_config.model_config.multimodal_config
    pictures = min(
        schedule.max_num_encoder_input_tokens // most, schedule.max_num_seqs * rules.get_limit_per_prompt("image")
    )
    return most * max(1, pictures)
