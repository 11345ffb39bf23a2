"""A request on either path: its stages answer as the whole model does."""

from typing import Any

import pytest
import torch

from diffprune.speed import profile, stages
from diffprune.speed.stages import EagerRequest, FastRequest, TimedLayerPruner
from diffprune.speed.subject import load_subject, with_method
from tests.clock import FakeClock
from tests.contracts.vlm import splice_all
from tests.speed.sample import OPTIONS, batch_of


@pytest.mark.parametrize("method", ["diffprune", "visionzip", "pyramiddrop"])
def test_an_eager_request_answers_as_generate_does(subject, method):
    vlm = with_method(subject, method, keep=3, dtype=torch.float32)
    batch = batch_of(subject)
    request = EagerRequest(vlm, batch)
    first = request.ttft()
    request.start()
    request.step()
    if method == "pyramiddrop":
        lm = splice_all(vlm, batch, request.tokens)
        answer = vlm.decoder.generate(lm, request.counts, max_new_tokens=2)
    else:
        lm = vlm.lm_inputs(batch, vlm.encode(batch))
        answer = vlm.backbone.generate(lm, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert first == answer[:, 0].tolist()
    assert request.token.tolist() == answer[:, 1].tolist()


@pytest.mark.parametrize("backbone", ["llava-1.5-7b", "qwen2.5-vl-7b"])
def test_the_steps_of_the_full_model_are_those_of_the_stock_model_s_generate(backbone):
    full = load_subject(backbone, random_weights=True, tiny=True, device="cpu", dtype=torch.float32)
    batch = batch_of(full, batch=1)
    request, answer = EagerRequest(full, batch), []
    request.start()
    for _ in range(4):
        answer.append(request.token.tolist())
        request.step()
    settings: dict[str, Any] = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    stock = full.base.generate(**batch.features, **settings, eos_token_id=None)
    assert torch.tensor(answer).T.tolist() == stock[:, -4:].tolist()


def test_the_stock_model_s_first_token_is_its_own(subject):
    batch = batch_of(subject)
    request = EagerRequest(subject, batch)
    stock = subject.base.generate(**batch.features, max_new_tokens=1, min_new_tokens=1, do_sample=False, pad_token_id=0)
    assert request.ttft() == stock[:, -1].tolist()
    assert request._prefill()[0].tolist() == stock[:, -1].tolist()


def test_both_paths_give_the_same_first_token(subject):
    batch = batch_of(subject)
    vlm = with_method(subject, "diffprune", keep=3, dtype=torch.float32)
    weights = profile.FastWeights(profile.ProfileSettings(**OPTIONS))
    weights.compile(vlm, batches=[2], texts=[40], size=(112, 84), decode=True)
    fast, eager = FastRequest(vlm, batch), EagerRequest(vlm, batch)
    assert fast.ttft() == eager.ttft()
    assert fast.num_kept == eager.num_kept == 3 and fast.num_columns > eager.num_columns
    fast.start()
    eager.start()
    fast.step()
    eager.step()
    assert fast.run.token.tolist() == eager.token.tolist()


def test_a_timed_method_keeps_the_time_of_its_choices_alone(subject, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(stages, "time", clock)
    vlm = with_method(subject, "pyramiddrop", keep=3, dtype=torch.float32)
    request = EagerRequest(vlm, batch_of(subject))
    assert isinstance(request.cuts, TimedLayerPruner)
    choose = vlm.method.select_at
    choices: list[int] = []

    def slow(*args: Any) -> Any:
        clock.advance(0.002)
        choices.append(1)
        return choose(*args)

    monkeypatch.setattr(vlm.method, "select_at", slow)
    request._prefill()
    assert choices and request.cuts.take_ms() == pytest.approx(2.0 * len(choices))
    assert request.cuts.take_ms() == 0
