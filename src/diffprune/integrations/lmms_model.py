"""lmms-eval's model `diffprune`: any pruned model, in batches, one process a device.

The harness alone imports this file, or who has asked for it (`require_harness`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, TokenCounts  # pyright: ignore[reportMissingImports]
from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from lmms_eval.protocol import ChatMessages  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from diffprune.api import load_vlm
from diffprune.integrations.resuming import Answered, Said, answer_open
from diffprune.model import PrunedVLM

MOST_NEW_TOKENS = 1024  # where a task names no number; the harness's own LLaVA has the same


class Asked(NamedTuple):
    """One request: its pictures and text, how to generate, where to cut the answer; its messages if it is more."""

    images: list[Any]
    text: str
    settings: dict[str, Any]
    until: tuple[str, ...]
    messages: list[dict[str, Any]] | None = None


class Simple(lmms):
    """Answers requests that give pictures and text apart.

    Args:
        pruner: A saved pruner; it names its base model.
        pretrained: Without a pruner, the base model.
        method: Around that base model, with options `fastv[layer=3]`; default: full.
        keep: The budget: 64 is tokens, 0.1111 a share.
        batch_size: Prompts that are answered together.
        device: Where one process runs; several take one device each.
        vlm: A ready model in place of all of these.
        answered: What was answered before, and where answers are written down as they come.
    """

    is_simple = True

    def __init__(
        self,
        pruner: str = "none",
        pretrained: str = "",
        method: str = "",
        keep: int | float | str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,  # the harness gives it to every model
        vlm: PrunedVLM | None = None,
        answered: Answered | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise ValueError(
                f"model_args {', '.join(sorted(unknown))}: not known to diffprune; give pruner, pretrained, method, "
                "keep, batch_size or device"
            )
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if vlm is None:
            where = str(self.accelerator.device) if device is None or self._world_size > 1 else device
            vlm = load_named(pruner, pretrained, method, keep, where)
        self.vlm, self.answered = vlm, answered
        self.device = torch.device(vlm.base.device)
        self.batch_size = _whole(batch_size)

    def asked(self, requests: Sequence[Any]) -> Iterator[Asked]:
        """What each request asks."""
        for request in requests:
            text, generation, to_pictures, place, task, split = request.args
            yield asked_with(to_pictures(self.task_dict[task][split][place]) or [], text, generation)

    def generate_until(self, requests: Sequence[Any]) -> list[GenerationResult]:
        """One answer for each request, those of padding too: the harness counts them."""
        rows = [(request.args[-2], request.args[-3]) for request in requests]

        def answer(places: Sequence[int]) -> Iterator[tuple[list[int], list[Said]]]:
            everything = list(self.asked([requests[place] for place in places]))
            with tqdm(total=len(everything), desc="answers", disable=self._rank != 0) as bar:
                for batch in batches_of(everything, self.batch_size):
                    yield [places[index] for index in batch], self.answer([everything[index] for index in batch])
                    bar.update(len(batch))

        said = answer_open(rows, self.answered, answer)
        return [GenerationResult(text, TokenCounts(input_tokens=length)) for text, length in said]

    @torch.inference_mode()
    def answer(self, rows: Sequence[Asked]) -> list[Said]:
        """Requests with the same settings, answered together; each says how long its pruned prompt was."""
        vlm = self.vlm
        if rows[0].messages is None:
            batch = vlm.prepare([row.images or None for row in rows], [row.text for row in rows])
        else:
            batch = vlm.backbone.prepare_messages([row.messages for row in rows])
        tokens = vlm.encode(batch)
        lm = vlm.lm_inputs(batch, tokens)
        ids = vlm.decoder.generate(lm, vlm.prompt_counts(batch, vlm.counts(tokens)), **rows[0].settings)
        texts = vlm.backbone.tokenizer.batch_decode(ids, skip_special_tokens=True)
        lengths = lm.attention_mask.sum(-1).tolist()
        cuts = [cut(text.strip(), row.until) for row, text in zip(rows, texts, strict=True)]
        return list(zip(cuts, lengths, strict=True))

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refused: a pruned model answers, it does not rank given answers."""
        raise NotImplementedError("diffprune generates answers; choose a task of output_type generate_until")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refused: each request is one round."""
        raise NotImplementedError("diffprune answers one round; choose a task of output_type generate_until")


class Chat(Simple):
    """Answers requests that give messages, as the harness has them by default."""

    is_simple = False

    def asked(self, requests: Sequence[Any]) -> Iterator[Asked]:
        """What each request asks."""
        for request in requests:
            _, to_messages, generation, place, task, split = request.args
            chat = ChatMessages(messages=to_messages(self.task_dict[task][split][place]))
            pictures, videos, sounds = chat.extract_media()
            if videos or sounds:
                of = "videos" if videos else "sounds"
                raise ValueError(f"task {task} asks about {of}; diffprune answers about pictures")
            parts = [part for message in chat.messages for part in message.content]
            text = "".join(part.text for part in parts if part.type == "text")
            asked = asked_with(pictures, text, generation)
            # One question behind its pictures is what the model's own template makes of a question.
            in_order = [part.type for part in parts[: len(pictures)]] == ["image"] * len(pictures)
            plain = in_order and [message.role for message in chat.messages] == ["user"]
            yield asked if plain else asked._replace(messages=chat.to_hf_messages())


def load_named(pruner: str, pretrained: str, method: str, keep: int | float | str | None, device: str) -> PrunedVLM:
    """The model that `--model_args` name."""
    if pruner == "none" and not pretrained:
        raise ValueError("model_args name no model; give pruner=DIR, or pretrained=BASE with method=NAME")
    budget = None if keep is None else str(keep)
    return load_vlm(pruner, model=pretrained or None, method=method or None, keep=budget, device=device)


def asked_with(images: list[Any], text: str, generation: Mapping[str, Any]) -> Asked:
    """A request, its generation settings as `generate` takes them; what other models' loaders read is left out."""
    until = generation.get("until") or ()
    warm = float(generation.get("temperature") or 0.0)
    settings: dict[str, Any] = {
        "max_new_tokens": int(generation.get("max_new_tokens") or MOST_NEW_TOKENS),
        "do_sample": bool(generation.get("do_sample", True)) and warm > 0,
    }
    if settings["do_sample"]:
        settings |= {"temperature": warm} | {key: generation[key] for key in ("top_p", "top_k") if generation.get(key)}
    if (beams := int(generation.get("num_beams") or 1)) > 1:
        settings["num_beams"] = beams
    return Asked(images, text, settings, (until,) if isinstance(until, str) else tuple(until))


def batches_of(rows: Sequence[Asked], batch_size: int) -> Iterator[list[int]]:
    """Places of requests to be answered together: with equal settings, long prompts first, so that few are padded."""
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(repr((sorted(row.settings.items()), row.messages is None)), []).append(place)
    for places in groups.values():
        places.sort(key=lambda place: (-len(rows[place].images), -len(rows[place].text)))
        yield from (places[start : start + batch_size] for start in range(0, len(places), batch_size))


def cut(text: str, until: Sequence[str]) -> str:
    """The answer up to the first of the words that end it."""
    for stop in until:
        text = text.split(stop)[0] if stop else text
    return text.strip()


def _whole(batch_size: int | str) -> int:
    try:
        return max(1, int(batch_size))
    except ValueError:
        raise ValueError(f"batch_size={batch_size!r} is no number; give the prompts that fit together") from None
