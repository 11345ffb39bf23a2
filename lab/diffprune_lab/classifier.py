"""PrunedClassifier: an image classifier that keeps only some of its patch tokens, for probes on small models.

The same two paths as PrunedVLM: `loss` weakens every token by its weight, `logits` drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffprune.backbones.processors import open_image, pixel_seed
from diffprune.methods.base import Pruner
from diffprune.methods.options import build_method
from diffprune.ops.noise import Generators
from diffprune.registry import METHODS
from diffprune.types import Budget, Selection
from diffprune_lab.deit import DeiT, Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures as the classifier takes them.

    Args:
        pixel_values: From its image processor.
        labels: The classes, for the loss.
        sizes: (width, height) of each original picture.
        seeds: One number per picture, made from its pixels.
    """

    pixel_values: Float[Tensor, "B C height width"]
    labels: Int[Tensor, " B"] | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    seeds: tuple[int, ...] | None = None


class PrunedClassifier(nn.Module):
    """A DeiT or ViT classifier with a pruning method in it.

    Args:
        model: The loaded classifier. It is frozen and stays untouched.
        image_processor: Its image processor; default: none, for pixel tensors alone.
        method: A method's name (`dp.methods()`) or a built `Pruner`.
        keep: The budget: an int is tokens per image, a float a share. Every call may give its own.
        cut: How many blocks run before tokens are dropped; 0 drops right after the embedding.
        options: Of the method.

    Example:
        classifier = PrunedClassifier(model, image_processor, method="feature_norm", keep=0.5, cut=3)
        classifier.classify([image])
    """

    def __init__(
        self,
        model: nn.Module,
        image_processor: Any = None,
        *,
        method: str | Pruner = "full",
        keep: int | float = 1.0,
        cut: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._base = (model.requires_grad_(False).eval(),)  # in a tuple, so that the frozen model is no submodule
        self.backbone = DeiT(model, image_processor, cut=cut)
        if isinstance(method, str):
            if METHODS.get(method).is_inside:
                raise ValueError(f"method {method!r} needs a language model, which an image classifier cannot give")
            method = build_method(method, block=self.backbone.block, **options)
        elif options:
            raise ValueError(f"options {', '.join(options)} given beside a built method; give them to the method")
        missing = method.needs - self.backbone.provides
        if missing or method.is_inside:
            wanted = ", ".join(sorted(missing)) or "a language model"
            raise ValueError(f"method {method.name!r} needs {wanted}, which an image classifier cannot give")
        if method.needs and cut == 0:
            wanted = ", ".join(sorted(method.needs))
            raise ValueError(
                f"method {method.name!r} needs {wanted}, and no block has run at cut=0; give cut=1 or more"
            )
        self.budget = Budget(keep, method.rounding)
        self.method = cast(Pruner, method.to(next(model.parameters()).device))

    @property
    def base(self) -> Any:
        """The untouched Hugging Face model."""
        return self._base[0]

    def prepare(self, images: Sequence[Any], labels: Sequence[int] | None = None) -> Pictures:
        """Pictures (paths, PIL images or arrays) as the model takes them; with `labels`, for the loss."""
        processor = self.backbone.image_processor
        if processor is None:
            raise ValueError("this classifier has no image processor; give one, or pass pixel tensors")
        if labels is not None and len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images; give one each")
        pictures = [open_image(image) for image in images]
        device = next(self.base.parameters()).device
        return Pictures(
            pixel_values=processor(images=pictures, return_tensors="pt")["pixel_values"].to(device, self.base.dtype),
            labels=None if labels is None else torch.tensor(list(labels), device=device),
            sizes=tuple(picture.size for picture in pictures),
            seeds=tuple(pixel_seed(picture) for picture in pictures),
        )

    def loss(
        self,
        batch: Pictures,
        *,
        tau: float | Tensor = 1.0,
        keep: int | float | None = None,
        generator: Generators = None,
        hard: bool = False,
    ) -> Float[Tensor, ""]:
        """Cross entropy with every token weakened by its weight and none dropped; `hard` drops instead."""
        if batch.labels is None:
            raise ValueError("the batch has no labels to learn from; make it with prepare(images, labels)")
        logits = self.logits(batch, keep=keep, hard=hard, tau=tau, generator=generator)
        return F.cross_entropy(logits.float(), batch.labels)

    forward = loss

    def logits(
        self,
        batch: Pictures | Float[Tensor, "B C height width"],
        *,
        keep: int | float | None = None,
        hard: bool = True,
        tau: float | Tensor = 1.0,
        generator: Generators = None,
    ) -> Float[Tensor, "B classes"]:
        """Class logits with K patch tokens per picture; with `hard=False` with all of them, each weakened."""
        encoded = self.encode(batch)
        counts = self._counts(encoded, keep)
        if hard:
            return self.drop(encoded, counts)
        restricted = self.method.restrict(encoded.tokens, counts, tau=tau, generator=generator)
        if restricted.soft_mask is not None:
            raise ValueError(
                f"method {self.method.name!r} learns by hiding tokens from a language model's attention, and an image "
                "classifier has none; train it on a vision-language model"
            )
        return self.backbone.logits(encoded.prefix, restricted.x)

    def encode(self, batch: Pictures | Float[Tensor, "B C height width"]) -> Encoded:
        """Patch tokens where the model is cut, with what the method needs."""
        if isinstance(batch, Tensor):
            batch = Pictures(pixel_values=batch)
        return self.backbone.encode(batch.pixel_values, self.method.needs, sizes=batch.sizes, seeds=batch.seeds)

    def drop(self, encoded: Encoded, counts: Int[Tensor, " B"]) -> Float[Tensor, "B classes"]:
        """Class logits from the tokens the method keeps or makes."""
        tokens = encoded.tokens
        kept = self.method.deploy(tokens, counts)
        return self.backbone.logits(encoded.prefix, kept.x, kept.index >= 0)

    @torch.inference_mode()
    def classify(self, images: Sequence[Any], *, keep: int | float | None = None) -> Int[Tensor, " B"]:
        """The most likely class of each picture."""
        return self.logits(self.prepare(images), keep=keep).argmax(-1)

    @torch.inference_mode()
    def select(self, images: Sequence[Any], *, keep: int | float | None = None) -> Selection:
        """What the method keeps of each picture, with its scores, its grid and where each token looks."""
        tokens = self.encode(self.prepare(images)).tokens
        kept, logits = self.method.choose(tokens, self._budget(keep).counts(tokens.mask))
        return Selection.of(tokens, kept, logits)

    def _counts(self, encoded: Encoded, keep: int | float | None) -> Int[Tensor, " B"]:
        return self._budget(keep).counts(encoded.tokens.mask)

    def _budget(self, keep: int | float | None) -> Budget:
        return self.budget if keep is None else Budget(keep, self.method.rounding)
