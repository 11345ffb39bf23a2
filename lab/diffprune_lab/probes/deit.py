"""The classifiers the probes run on: DeiT-Tiny, -Small and -Base, trained from scratch on small photographs, or given.

Trained here they are small-data models: 64-pixel pictures, patches of 4, so 256 tokens, and minutes of training. During
the first part of it each picture shows a quarter or a sixteenth of its patches (`hiding`), which is cheap and makes the
models used to missing tokens, as large models are; the last part sees them all. They are also trained to say what each
patch shows (`labels`), which makes them read the object rather than what surrounds it.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from diffprune.atomic import write_text
from diffprune.config import OptimConfig, TauConfig
from diffprune.ops import take_tokens
from diffprune.train.loop import train
from diffprune_lab.deit import DeiT
from diffprune_lab.probes.augment import (
    MEAN,
    STD,
    crop,
    draw_crops,
    draw_mixture,
    inside_cropped,
    mix,
    normalise,
    recolour,
)
from diffprune_lab.probes.data import Photos, draw_rows
from diffprune_lab.probes.hiding import PARTS, SHOWN, draw_shown
from diffprune_lab.probes.labels import LABELS, TOKEN_WEIGHT, part_targets, token_targets

WIDTHS = {"deit-tiny": 192, "deit-small": 384, "deit-base": 768}
RATES = {"deit-tiny": 1e-3, "deit-small": 7e-4, "deit-base": 4e-4}
RECORD = "training.json"  # beside saved weights: how they were trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a classifier; a width of None follows from its name."""

    side: int = 64
    patch: int = 4
    depth: int = 12
    width: int | None = None
    head_width: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a classifier was trained and how good it is, for a results row.

    Args:
        trained_at: When it ended; identifies the training.
        epochs: Passes over the pictures.
        top1: Percent right on pictures it was not trained on.
        curve: Step, training loss (of mixed pictures) and top-1 at some moments.
        hide: Share of the training that saw a part of the patches; None where that was not written down.
        parts: Of what make-up those were (now always `hiding.PARTS`).
        labels: What it was trained on (now always `labels.LABELS`).
    """

    trained_at: str
    batch: int
    epochs: float
    seconds: float
    samples_s: float
    top1: float
    top5: float
    parameters: int
    num_visual: int
    curve: dict[str, list[float]]
    hide: float | None = None
    parts: str = "any"
    labels: str = "picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A frozen classifier, how its pixels are normalised, and how it was trained where that is known."""

    model: nn.Module
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    training: Training | None = None

    @property
    def config(self) -> Any:
        return cast(Any, self.model).config

    def pixel_values(
        self, pixels: UInt8[Tensor, "B 3 h w"] | Float[Tensor, "B 3 h w"]
    ) -> Float[Tensor, "B 3 side side"]:
        """Normalised and, where the model wants another size, resized."""
        side = self.config.image_size
        x = pixels if pixels.is_floating_point() else pixels.float() / 255
        if x.shape[-1] != side:
            x = F.interpolate(x, size=(side, side), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        return normalise(x, self.mean, self.std)


def build_deit(name: str, num_classes: int, shape: Shape) -> nn.Module:
    """A DeiT with random weights."""
    from transformers import DeiTConfig, DeiTForImageClassification

    width = shape.width or WIDTHS[name]
    return DeiTForImageClassification(
        DeiTConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=shape.depth,
            num_attention_heads=width // min(width, shape.head_width),
            image_size=shape.side,
            patch_size=shape.patch,
            num_labels=num_classes,  # pyright: ignore[reportCallIssue]
        )
    )


class CompiledDeiT(DeiT):
    """A classifier with compiled blocks. All blocks share one graph, so that it is there in seconds.

    Every shape is a graph of its own: give it few of them.
    """

    @property
    def blocks(self) -> Any:
        return [partial(_compiled_block(), block) for block in super().blocks]


@cache
def _compiled_block() -> Callable[..., Tensor]:
    def run(block: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return block(hidden, mask)

    return torch.compile(run, dynamic=False)


def train_deit(
    name: str,
    photos: Photos,
    held_out: Photos,
    *,
    shape: Shape,
    epochs: int,
    batch: int,
    seconds: float | None,
    hide: float,
    seed: int = 42,
    say: Callable[[str], None] = lambda text: None,
) -> Classifier:
    """A classifier trained from scratch: at most so many epochs, and at most so many seconds after compiling.

    Args:
        held_out: Pictures for the curve and the final accuracy.
        seconds: The learning rate follows the share of it that has passed; None trains all epochs.
        hide: Share of the training that sees a part of the patches: cheaper, and used to missing tokens.
        say: Gets the accuracy at every tenth of the run.
    """
    device = photos.pixels.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_deit(name, photos.num_classes, shape).to(device).train()
        token_head = nn.Linear(cast(Any, model).config.hidden_size, photos.num_classes + 1).to(device)  # for training
    on_gpu = device.type == "cuda"
    backbone = CompiledDeiT(model) if on_gpu else DeiT(model)

    def read(x: Tensor, keep: Tensor | None) -> Tensor:
        hidden = backbone.trunk.embeddings(x)
        prefix, patches = hidden[:, :2], hidden[:, 2:]  # [CLS] and the distillation token, then the patches
        return backbone.states(prefix, patches if keep is None else take_tokens(patches, keep))

    steps = max(1, epochs * len(photos) // batch)
    num_patches = backbone.side**2
    start = time.perf_counter()

    def passed(step: int) -> float:
        return max(step / steps, 0.0 if seconds is None else (time.perf_counter() - start) / seconds)

    def loss(step: int, tau: float) -> Float[Tensor, ""]:
        del tau
        rows, generator = draw_rows(photos, batch, seed=seed, step=step)
        crops, own = draw_crops(batch, generator), draw_mixture(shape.side, seed * 1_000_003 + step, device)
        x = mix(normalise(recolour(crop(photos.pixels[rows], crops), generator)), own)
        targets = mix(F.one_hot(photos.labels[rows], photos.num_classes).float(), own.mean())
        inside = inside_cropped(photos.boxes[rows], crops, backbone.side)
        tokens = token_targets(photos.labels[rows], inside, photos.num_classes)  # [B, N, classes + 1]
        tokens = mix(tokens, F.avg_pool2d(own[None], shape.patch).view(-1, 1))
        keep = None
        if passed(step) < hide:
            count = max(1, num_patches // SHOWN[step % len(SHOWN)])
            keep = draw_shown(batch, backbone.side, count, generator)
            tokens = take_tokens(tokens, keep)
            targets = part_targets(tokens)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            hidden = read(x, keep)
            logits, named = backbone.answer(hidden), token_head(hidden[:, 2:])
        value = F.cross_entropy(logits.float(), targets, label_smoothing=0.1)
        return value + TOKEN_WEIGHT * F.cross_entropy(named.float().flatten(0, 1), tokens.flatten(0, 1))

    if on_gpu:  # compiling every kind of step is no part of the time
        for step in (*(range(len(SHOWN)) if hide else ()), steps):
            loss(step, 1.0).backward()
        start = time.perf_counter()
    curve: dict[str, list[float]] = {"step": [], "loss": [], "top1": []}
    reported = 0.0

    def watch(step: int, value: float) -> None:
        nonlocal reported
        if passed(step + 1) >= reported + 0.1:
            reported = passed(step + 1)
            top1, _ = accuracy(Classifier(model=model), held_out)
            for key, number in (("step", float(step + 1)), ("loss", value), ("top1", top1)):
                curve[key].append(round(number, 4))
            say(f"{name}: step {step + 1}, loss {value:.3f}, top-1 {top1:.1f} %")

    losses = train(
        [*model.parameters(), *token_head.parameters()],
        loss,
        steps=steps,
        seconds=seconds,
        optim=OptimConfig(lr=RATES[name], weight_decay=0.05, warmup=0.06),
        tau=TauConfig(),
        on_step=watch,
    )
    spent = time.perf_counter() - start
    model.eval().requires_grad_(False)
    top1, top5 = accuracy(Classifier(model=model), held_out)
    training = Training(
        trained_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        batch=batch,
        epochs=round(len(losses) * batch / len(photos), 1),
        seconds=round(spent, 1),
        samples_s=round(len(losses) * batch / spent, 1),
        top1=round(top1, 2),
        top5=round(top5, 2),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_visual=num_patches,
        curve=curve,
        hide=hide,
        parts=PARTS,
        labels=LABELS,
    )
    return Classifier(model=model, training=training)


@torch.no_grad()
def accuracy(classifier: Classifier, photos: Photos, chunk: int = 500) -> tuple[float, float]:
    """Top-1 and top-5 in percent with every token there."""
    model = classifier.model
    was_training = model.training
    model.eval()
    backbone = DeiT(model)
    found = []
    for rows in torch.arange(len(photos)).split(chunk):
        with torch.autocast(photos.pixels.device.type, torch.bfloat16, enabled=photos.pixels.is_cuda):
            encoded = backbone.encode(classifier.pixel_values(photos.pixels[rows]))
            logits = backbone.logits(encoded.prefix, encoded.tokens.x)
        found.append(right_answers(logits, photos.labels[rows]))
    model.train(was_training)
    top1, top5 = torch.cat(found).float().mean(0).mul(100).tolist()
    return top1, top5


def right_answers(logits: Float[Tensor, "B classes"], labels: Tensor) -> Tensor:
    """[B, 2]: whether the label is the first answer, and whether it is among the first five."""
    order = logits.float().topk(min(5, logits.shape[-1]), dim=-1).indices == labels[:, None]
    return torch.stack([order[:, 0], order.any(-1)], dim=-1)


# --- weights ----------------------------------------------------------------------------------------------------------


def save_deit(classifier: Classifier, folder: Path) -> None:
    """Weights in the Hugging Face format, with how they were trained beside them."""
    assert classifier.training is not None
    cast(Any, classifier.model).save_pretrained(folder)
    write_text(folder / RECORD, json.dumps(asdict(classifier.training)) + "\n")


def load_deit(weights: str, names: tuple[str, ...], device: str | torch.device) -> Classifier:
    """A classifier from a folder or hub id, frozen; its classes are cut down to `names` where it knows more.

    Args:
        weights: DeiT or ViT, of `save_deit` or anybody's.
        names: Class names of the pictures; empty where the pictures have none.
    """
    from transformers import AutoModelForImageClassification
    from transformers.image_processing_base import ImageProcessingMixin

    from diffprune.loading import refuse_gaps, say_hub_is_asked

    if not Path(weights).is_dir():
        say_hub_is_asked(weights)
    try:
        model, info = AutoModelForImageClassification.from_pretrained(
            weights, output_loading_info=True, trust_remote_code=False
        )
    except OSError as error:
        reason = str(error).split(".")[0]
        raise ValueError(
            f"weights {weights!r} cannot be loaded ({reason}); give a folder or hub id of a DeiT or ViT"
        ) from error
    refuse_gaps(weights, info)
    model = _choose_classes(model, names).to(device).eval().requires_grad_(False)
    record = Path(weights) / RECORD
    if record.is_file():
        return Classifier(model=model, training=Training(**json.loads(record.read_text(encoding="utf-8"))))
    processor, _ = ImageProcessingMixin.get_image_processor_dict(weights)
    return Classifier(model=model, mean=tuple(processor["image_mean"]), std=tuple(processor["image_std"]))


def _choose_classes(model: Any, names: tuple[str, ...]) -> Any:
    """The model with the rows of its head that belong to `names`, in their order."""
    if not names or model.config.num_labels == len(names):
        return model
    known: dict[str, int] = {}
    for index, label in model.config.id2label.items():
        for word in str(label).split(","):
            known.setdefault(word.strip().lower(), int(index))
    missing = [name for name in names if name.lower() not in known]
    if missing:
        raise ValueError(
            f"the weights know {model.config.num_labels} classes, and {missing[0]!r} of the pictures is none of them; "
            "give weights trained for these pictures, or leave --weights out"
        )
    rows = [known[name.lower()] for name in names]
    for part in ("classifier", "cls_classifier", "distillation_classifier"):
        head = getattr(model, part, None)
        if isinstance(head, nn.Linear):
            chosen = nn.Linear(head.in_features, len(rows), dtype=head.weight.dtype)
            with torch.no_grad():
                chosen.weight.copy_(head.weight[rows])
                chosen.bias.copy_(head.bias[rows])
            setattr(model, part, chosen)
    return model
