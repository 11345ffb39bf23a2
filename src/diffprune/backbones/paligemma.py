"""PaliGemma: SigLIP tower, one linear projector, Gemma with a prefix that is read in both directions.

Pictures come first in every prompt, then the text and a line break; all of it sees all of it, and only the answer is
causal (`token_type_ids` says which is which). Positions count from 1.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn
from transformers import DynamicCache

from diffprune.backbones._clip import crop_boxes, layer_attention
from diffprune.backbones.base import Backbone, Preset, with_needs
from diffprune.backbones.messages import Talk
from diffprune.backbones.prompts import Batch
from diffprune.registry import BACKBONES
from diffprune.types import LMInputs, VisualTokens


@BACKBONES.register("paligemma")
class PaliGemma(Backbone):
    family: ClassVar[str] = "paligemma"
    unserved: ClassVar[str | None] = "its prompts are read in both directions, and the engine reads forwards"
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    sequence_features: ClassVar[Mapping[str, int]] = {"token_type_ids": 1}  # an answer is causal
    presets: ClassVar[dict[str, Preset]] = {
        "paligemma-3b-224": Preset(hub_id="google/paligemma-3b-mix-224", num_visual="256"),
        "paligemma-3b-448": Preset(hub_id="google/paligemma-3b-mix-448", num_visual="1024"),
    }

    def vision_modules(self) -> dict[str, nn.Module]:
        return {"vision_tower": self.model.model.vision_tower, "projector": self.model.model.multi_modal_projector}

    # ------------------------------------------------------------------------------------- prompts

    def _prompt(self, text: str, num_images: int, chat: bool) -> str:
        """Pictures first; a question needs no placeholder and no template."""
        if self.image_token not in text:
            return self.placeholder_prompt(num_images) + text
        return super()._prompt(text, num_images, chat)

    def lay_out(self, talk: Talk) -> str:
        """Pictures first, then a line for each message: the family has no turns of its own."""
        lines = ["".join(part.get("text", "") for part in turn["content"]) for turn in talk.turns]
        return self._prompt("\n".join(lines), len(talk.pictures), chat=False)

    def written(self, prompt: str) -> str:
        """The text begins behind the last picture, and a line break ends it."""
        before, found, after = prompt.rpartition(self.image_token)
        return f"{before}{found}{self.tokenizer.bos_token}{after}\n"

    def prompt_features(self, ids: Int[Tensor, "B T"]) -> dict[str, Tensor]:
        return {"token_type_ids": torch.zeros_like(ids)}  # all of it is prefix

    def process(self, pictures: list[list[Image.Image]], prompts: list[str]) -> dict[str, Tensor]:
        """Ids as the family's own processor makes them, also for prompts without a picture, which that one refuses."""
        image = self.image_token
        texts = [self.written(prompt).replace(image, image * self.processor.image_seq_length) for prompt in prompts]
        text = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        features = {key: text[key] for key in ("input_ids", "attention_mask")}
        features |= self.prompt_features(features["input_ids"])
        flat = [picture for row in pictures for picture in row]
        if flat:
            features["pixel_values"] = self.processor.image_processor(images=flat, return_tensors="pt")["pixel_values"]
        return features

    def _answer_ids(self, answer: str) -> list[int]:
        """An answer follows the prompt's line break at once."""
        return [*self.tokenizer(answer, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    # ------------------------------------------------------------------------------------- positions and masks

    def positions(self, batch: Batch) -> Int[Tensor, "B T"]:
        return batch.features["attention_mask"].cumsum(-1)  # from 1

    def generation_positions(self, lm: LMInputs) -> Int[Tensor, "B T"]:
        return lm.position_ids - 1  # the family's own `generate` adds the one

    def run_generate(self, lm: LMInputs, **kwargs: Any) -> Any:
        """By a cache filled here: the family's own `generate` takes no embeddings.

        The whole prefix must run at once, as its last token is seen by all. So all of it is run, the last position is
        taken off the cache again, and `generate` goes on from that one token, which is text.
        """
        if kwargs.get("cache_implementation") is not None:
            raise ValueError(
                f"cache_implementation={kwargs['cache_implementation']!r} cannot be chosen for paligemma: its cache is "
                "filled before generate; leave it out"
            )
        out = self.model.model(
            inputs_embeds=lm.inputs_embeds,
            attention_mask=lm.attention_mask,
            position_ids=lm.position_ids,
            past_key_values=DynamicCache(config=self.config.text_config),
            use_cache=True,
            **lm.extra,
        )
        cache = out.past_key_values
        cache.crop(-1)
        copies = max(kwargs.get("num_beams") or 1, kwargs.get("num_return_sequences") or 1)
        if copies > 1:
            cache.batch_repeat_interleave(copies)
        return self.go_on(lm, cache, **kwargs)

    def two_way(self, lm: LMInputs) -> Bool[Tensor, "B T"]:
        types = lm.extra["token_type_ids"]
        assert isinstance(types, Tensor)
        return (types == 0) & lm.attention_mask.bool()

    # ------------------------------------------------------------------------------------- pictures

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower, vision = self.model.model.vision_tower, self.config.vision_config
        out = tower(batch.features["pixel_values"], output_hidden_states=True)
        side = vision.image_size // vision.patch_size
        extra: dict[str, Any] = {}
        if needs & {"cls_attention", "keys"}:
            attention, keys = layer_attention(tower, out.hidden_states, -1, has_cls=False)
            extra = {name: value for name, value in (("cls_attention", attention), ("keys", keys)) if name in needs}
        tokens = VisualTokens(
            x=out.last_hidden_state,
            grid=((side, side),) * batch.num_images,
            seeds=batch.seeds,
            boxes=crop_boxes(self.processor.image_processor, batch.sizes, side, out.last_hidden_state.device),
            **extra,
        )
        return with_needs(self, batch, tokens, needs)

    def project(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        return self.model.model.multi_modal_projector(x)
