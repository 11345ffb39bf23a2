"""Whole requests on the fast path: from pixels to new tokens, greedy or by whatever transformers' `generate` can do."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from diffprune.backbones.prompts import Batch
from diffprune.fast.options import NotCompiled, read_decoding
from diffprune.fast.request import Request
from diffprune.types import Keep

Choose = Callable[[Float[Tensor, "B V"]], Int[Tensor, " B"]]  # tokens of all rows from their logits, in float32


class Answering:
    """The part of `FastPath` that runs its stages one after the other and decodes."""

    @torch.inference_mode()
    def start(self, batch: Batch, *, keep: Keep | None = None) -> Request:
        """Everything up to the first token; the prompt is laid out while the encoder runs."""
        fast: Any = self
        request = fast._begin(batch, keep)
        try:
            fast.encode(request)
        except RuntimeError:  # of a model that was moved or cast since, which is said then, or of something else
            fast.seal.check_weights()
            raise
        fast._lay_out(request)
        fast.prune(request)
        fast.splice(request)
        fast.prefill(request)
        return request

    @torch.inference_mode()
    def ttft(self, batch: Batch, *, keep: Keep | None = None) -> Int[Tensor, " B"]:
        """The first token of each prompt, on the host."""
        fast: Any = self
        with fast.turn():
            return self.start(batch, keep=keep).token.cpu()

    @torch.inference_mode()
    def generate(
        self,
        batch: Batch,
        *,
        max_new_tokens: int,
        keep: Keep | None = None,
        ends: Sequence[int] = (),
        pad_id: int | None = None,
        streamer: Any = None,
        steering: dict[str, Any] | None = None,
    ) -> Int[Tensor, "B T"]:
        """New tokens, on the model's device.

        Args:
            ends: Tokens that end an answer, where decoding is greedy.
            pad_id: What stands behind an answer that has ended before others; default: the model's own.
            streamer: Is given the prompts and each step's tokens, as by transformers' `generate`.
            steering: All arguments of transformers' `generate`, where it is to choose the tokens; None: the likeliest.
        """
        fast: Any = self
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} leaves nothing to say; give 1 or more")
        if max_new_tokens > fast.max_new_tokens:
            raise NotCompiled(f"the answer may be longer than the {fast.max_new_tokens} tokens compiled for")
        if steering is not None and fast.vlm.method.is_inside:
            raise NotCompiled("the method drops inside the language model, where only greedy decoding is compiled")
        with fast.turn():
            request = self.start(batch, keep=keep)
            if steering is not None:
                return self.steer(request, max_new_tokens, steering)
            if streamer is not None:
                streamer.put(self.prompts(request)[0].cpu())
            done = torch.zeros(request.rows, dtype=torch.bool)
            end_ids = torch.tensor(list(ends), dtype=torch.int64)
            pad = fast.backbone.pad_id if pad_id is None else pad_id
            new: list[Tensor] = []
            for found in self.tokens(request, max_new_tokens):
                token = torch.where(done, pad, found)
                new.append(token)
                if streamer is not None:
                    streamer.put(token)
                done = done | torch.isin(token, end_ids)
                if bool(done.all()):
                    break
            if streamer is not None:
                streamer.end()
            return torch.stack(new, dim=1).to(fast.device)

    def steer(self, request: Request, max_new_tokens: int, kwargs: dict[str, Any]) -> Int[Tensor, "B T"]:
        """New tokens of a started request as transformers' `generate` chooses and ends them.

        It reads the arguments and makes the processors and criteria; this is the loop between them, as its own
        sampling has it, over compiled steps. So one seed gives the same draws as without the fast path.
        """
        fast: Any = self
        ids, mask = (tensor.to(fast.device) for tensor in self.prompts(request))
        asked = {"pad_token_id": fast.backbone.pad_id, **kwargs}
        streamer = asked.get("streamer")
        stops, tokenizer = asked.pop("stop_strings", None), asked.pop("tokenizer", None)
        if stops is not None:  # made here, as the tokenizer is not handed on to a loop that is given
            if tokenizer is None:
                raise ValueError(
                    "stop_strings are given without a tokenizer; give tokenizer=vlm.processor.tokenizer too"
                )
            asked["stopping_criteria"] = [*(asked.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stops)]

        def loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **unused: Any,
        ) -> Tensor:
            del model, unused
            said, goes_on = input_ids, torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
            pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)

            def choose(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
                scores = logits_processor(said, logits)
                if generation_config.do_sample:
                    token = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
                else:
                    token = scores.argmax(-1)
                return torch.where(goes_on, token, generation_config.pad_token_id) if pads else token

            for token in self.tokens(request, max_new_tokens, choose):
                said = torch.cat([said, token[:, None]], dim=1)
                if streamer is not None:
                    streamer.put(token.cpu())
                goes_on = goes_on & ~stopping_criteria(said, None)
                if not bool(goes_on.any()):
                    break
            if streamer is not None:
                streamer.end()
            return said

        out = fast.vlm.base.generate(input_ids=ids, attention_mask=mask, custom_generate=loop, **asked)
        return out[:, ids.shape[1] :]

    def prompts(self, request: Request) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        """Ids and mask of what the language model was given, padded on the left, as on the reference path."""
        fast: Any = self
        if request.spliced is not None:
            return request.spliced.input_ids, request.spliced.attention_mask
        image, tokens = fast.backbone.image_token_id, request.tokens
        held = list(request.num_kept)
        has_newlines = tokens is not None and tokens.slots is not None
        ends = (request.bucket.last[: request.rows] + 1).tolist() if has_newlines else []
        rows: list[Tensor] = []
        for row, (ids, mask) in enumerate(zip(request.ids, request.mask, strict=True)):
            real = ids[mask]
            text = real != image
            count = ends[row] - int(text.sum()) if has_newlines else held[row]
            first = int((~text).nonzero()[0])
            behind = real[first:][text[first:]]
            rows.append(torch.cat([real[:first], real.new_full((count,), image), behind]))
        width = max(map(len, rows))
        padded = torch.full((len(rows), width), fast.backbone.pad_id, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, real in enumerate(rows):
            padded[row, width - len(real) :], mask[row, width - len(real) :] = real, 1
        return padded, mask

    @torch.inference_mode()
    def tokens(
        self, request: Request, max_new_tokens: int, choose: Choose | None = None
    ) -> Iterator[Int[Tensor, " B"]]:
        """The newest token of each row, step by step, of a request that was started.

        The next step is launched before a token is given, so that the device does not wait for who looks at it; a step
        past the end is thrown away.

        Args:
            choose: What takes each step's tokens, given on the model's device; None: the likeliest, given on the host.
        """
        if choose is not None:
            yield from self._chosen(request, max_new_tokens, choose)
            return
        fast: Any = self
        host = torch.zeros(max_new_tokens, request.rows, dtype=torch.int64, pin_memory=fast.capture)
        events = [torch.cuda.Event() for _ in range(max_new_tokens)] if fast.capture else []

        def fetch(step: int) -> None:
            host[step].copy_(request.token, non_blocking=True)
            if events:
                events[step].record()

        fetch(0)
        for step in range(max_new_tokens):
            ahead = step + 1 < max_new_tokens
            if fast.capture and ahead:
                fast.decode(request)
                fetch(step + 1)
            if events:
                events[step].synchronize()
            yield host[step]
            if not fast.capture and ahead:
                fast.decode(request)
                fetch(step + 1)

    def _chosen(self, request: Request, max_new_tokens: int, choose: Choose) -> Iterator[Int[Tensor, " B"]]:
        """Tokens that somebody chooses; each is in its place before the step that reads it is launched."""
        fast: Any = self
        for step in range(max_new_tokens):
            token = choose(request.logits.to(torch.float32, copy=True)).to(fast.device)
            request.token.copy_(token)
            ahead = step + 1 < max_new_tokens
            if fast.capture and ahead:
                fast.decode(request)
            yield token
            if not fast.capture and ahead:
                fast.decode(request)

    def answer(self, batch: Batch, *, keep: Keep | None = None, **kwargs: Any) -> Int[Tensor, "B T"] | None:
        """New tokens as `PrunedVLM.generate` wants them; None, said once, where the reference path must answer."""
        fast: Any = self
        try:
            return self.generate(batch, keep=keep, **read_decoding(fast.vlm.base.generation_config, kwargs))
        except NotCompiled as reason:
            fast.vlm._say_once(f"the fast path cannot answer here: {reason}; such requests run as without compile()")
            return None
