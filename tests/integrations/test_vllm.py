"""vLLM: the plug-in gives the ids that `PrunedVLM.generate` gives, over families, methods, positions, pieces, caches.

Each engine runs in a process of its own and is shared by the tests of its family; on two cores one starts in about a
minute. The reference is computed here, in this environment, by the same transformers.
"""

import base64
import importlib
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import diffprune as dp
from diffprune.integrations.vllm_command import engine_arguments
from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES
from tests import stock, tiny
from tests.integrations import engine

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]  # vLLM's warnings are its own

PRUNER = "scenes-llava-diffprune"
SERVED = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "internvl")


def request(vlm: PrunedVLM, text: str, images: list[Path], *, keep: Any = None, max_tokens: int = 8) -> dict[str, Any]:
    """A question as the engine takes it; the models of the lab end their answers, the tiny ones never do."""
    ends = vlm.base.generation_config.eos_token_id is not None
    return {
        "prompt": vlm.backbone._prompt(text, len(images), True),
        "images": [str(path) for path in images],
        "text": text,
        "keep": keep,
        "max_tokens": max_tokens,
        "ignore_eos": not ends,
    }


def wanted(vlm: PrunedVLM, one: dict[str, Any]) -> list[int]:
    """What our own path answers."""
    images = [Image.open(path).convert("RGB") for path in one["images"]]
    ids = vlm.generate(
        images=images or None,
        text=one["text"],
        max_new_tokens=one["max_tokens"],
        keep=one["keep"] if images else None,
        return_ids=True,
    )
    return ids[0].tolist()


def differing(vlm: PrunedVLM, asked: list[list[dict[str, Any]]], got: Any) -> list[str]:
    """Every request that the engine answers otherwise than our own path does."""
    assert "rounds" in got, got
    out = []
    for requests, answered in zip(asked, got["rounds"], strict=True):
        assert "error" not in answered[0], answered
        for one, other in zip(requests, answered, strict=True):
            ids = wanted(vlm, one)
            if ids != other["ids"]:
                out.append(f"{one['text']!r} of {len(one['images'])} with keep={one['keep']}: {ids} != {other['ids']}")
    return out


# scenes-llava with its pruner -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path]]:
    """A hundred questions, ten of each task, each with its picture; several pictures are asked about twice."""
    from diffprune_lab.scenes.encode import scene_images
    from diffprune_lab.scenes.source import SCENES_TASKS

    folder = tmp_path_factory.mktemp("scenes")
    questions = [one for task in SCENES_TASKS.build(count=10).tasks for one in task.questions[:10]]
    out = []
    for number, one in enumerate(questions):
        path = folder / f"{number}.png"
        scene_images([one.images[0]], "fixed")[0].save(path)
        out.append((one.prompt, path))
    assert len(out) == 100
    return out


@pytest.fixture(scope="module", params=["original", "packed"])
def llava(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, scenes: Any) -> Any:
    """The model by our own path, what was asked, and what the engine answered, by either rule of positions."""
    rule = request.param
    saved = dp.load(PRUNER, keep=32)
    vlm = PrunedVLM(saved.base, saved.processor, method=saved.method, keep=32, positions=rule)
    asked = {
        "hundred": [[ask(vlm, *one, keep=keep) for one in scenes] for keep in (32, 64)],
        # One picture, another budget each time, then another question about it, all in what the engine has kept.
        "alternating": [[ask(vlm, *scenes[0], keep=keep)] for keep in (32, 64, 0.1111, 32, 64, 1.0, 1)]
        + [[ask(vlm, "What colour is the ball?", scenes[0][1], keep=keep)] for keep in (64, 32)],
        "wrong": [[ask(vlm, *scenes[0], keep=keep)] for keep in (0, -1, "x", 1.5, True)],
        "more than there are": [[ask(vlm, *scenes[0], keep=10_000)]],
        "none": [[text_only(vlm)]],
        "chat": [[ask(vlm, *one, keep=64) | {"chat": True} for one in scenes[::10]]],
    }
    rounds = [one for name in asked for one in asked[name]]
    arguments = engine_arguments(PRUNER, keep=32, positions=rule)
    arguments |= {"enable_prefix_caching": True, "block_size": 32}  # else none of these prompts fills a block
    got = engine.answers(tmp_path_factory.mktemp(f"llava-{rule}"), arguments, rounds)
    assert "rounds" in got, got
    answered, start = {}, 0
    for name, some in asked.items():
        answered[name] = {"rounds": got["rounds"][start : start + len(some)]}
        start += len(some)
    return vlm, asked, answered


def ask(vlm: PrunedVLM, text: str, picture: Path, **more: Any) -> dict[str, Any]:
    return request(vlm, text, [picture], **more)


def text_only(vlm: PrunedVLM) -> dict[str, Any]:
    return request(vlm, "Which word?", [])


def test_a_hundred_questions_at_two_budgets(llava: Any) -> None:
    vlm, asked, got = llava
    assert differing(vlm, asked["hundred"], got["hundred"]) == []
    lengths = [{one["prompt"] for one in some} for some in got["hundred"]["rounds"]]
    assert max(lengths[0]) < 80 and all(few + 32 in lengths[1] for few in lengths[0])


def test_budgets_alternate_over_one_picture_and_what_is_cached_stays_apart(llava: Any) -> None:
    vlm, asked, got = llava
    assert differing(vlm, asked["alternating"], got["alternating"]) == []
    first, *_, one, _, _ = (some[0] for some in got["alternating"]["rounds"])
    assert first["prompt"] == one["prompt"] + 31
    assert any(some[0]["cached"] > 0 for some in got["alternating"]["rounds"][3:]), "nothing was taken from the cache"


def test_more_than_there_are_is_all_and_text_alone_works(llava: Any) -> None:
    vlm, asked, got = llava
    for name in ("more than there are", "none"):
        assert differing(vlm, asked[name], got[name]) == []
    assert got["more than there are"]["rounds"][0][0]["prompt"] > 576


def test_a_chat_from_python_begins_with_the_start_token_too(llava: Any) -> None:
    vlm, asked, got = llava
    assert differing(vlm, asked["chat"], got["chat"]) == []
    one, batch = asked["chat"][0][0], got["chat"]["rounds"][0][0]
    plain = vlm.prepare([[Image.open(one["images"][0])]], [one["text"]])
    assert batch["prompt"] == int(plain.features["attention_mask"].sum()) - 576 + 64


def test_a_wrong_budget_is_our_sentence_and_the_engine_lives_on(llava: Any) -> None:
    _, asked, got = llava
    for one, answered in zip(asked["wrong"], got["wrong"]["rounds"], strict=True):
        keep = one[0]["keep"]
        assert f"keep={keep!r}" in answered[0]["error"], answered


# Families and methods, tiny -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    out = []
    for seed, size in enumerate([(100, 70), (60, 90), (112, 112), (160, 40), (90, 120)]):
        out.append(folder / f"{seed}.png")
        tiny.picture(seed, size).save(out[-1])
    return out


def rounds_of(vlm: PrunedVLM, pictures: list[Path]) -> list[list[dict[str, Any]]]:
    """One picture a prompt, by two budgets; three of them, together; the same again, out of the caches."""
    some = [request(vlm, f"What is {number}?", [path]) for number, path in enumerate(pictures)]
    more = [request(vlm, "And with less?", [path], keep=keep) for path in pictures[:3] for keep in (2, 0.5)]
    three = [
        request(vlm, "Which of them?", [pictures[i] for i in which]) for which in ((0, 1, 2), (2, 3, 0), (4, 4, 1))
    ]
    return [some, more, three, three, some[:2]]


def save_wide(folder: Path, family: str) -> Path:
    """A tiny model's folder with heads of 32: the CPU build of vLLM has no attention for smaller ones."""
    module, heads = importlib.import_module(f"tests.tiny.{family}"), 2
    with pytest.MonkeyPatch.context() as patch:
        narrow = module.text_config
        wide = {"num_attention_heads": heads, "num_key_value_heads": heads}
        patch.setattr(module, "text_config", lambda tokenizer: narrow(tokenizer) | wide)
        if hasattr(module, "rope"):
            turned = module.rope() | {"mrope_section": [2 * part for part in module.rope()["mrope_section"]]}
            patch.setattr(module, "rope", lambda: turned)
        torch.manual_seed(0)
        model, processor = module.build()
        patch.setattr(stock.tiny, "build", lambda name: (tiny.finish(model, processor), processor))
        return stock.save_stock(folder, family, "saved")


def tiny_vlm(folder: Path, family: str, method: str) -> tuple[PrunedVLM, dict[str, Any]]:
    """A tiny model out of its folder with a method around it, and an engine's arguments for the same."""
    base = save_wide(folder / family, family)
    newline = {"newline": "all"} if family == "llava_next" else {}
    model, processor = load_base(str(base))
    model.generation_config.eos_token_id = None
    vlm = PrunedVLM(model, processor, method=method, keep=5, **newline)
    if not vlm.method.trained:
        return vlm, engine_arguments(model=str(base), method=method, keep=5, **newline)
    vlm.save_pretrained(folder / "pruner", base_id=str(base))
    return vlm, engine_arguments(str(folder / "pruner"), keep=5, **newline)


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        # Prompts of several pictures in pieces of 32 tokens: places come in more than one piece.
        ("qwen2_5_vl", "diffprune", {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}),
        ("qwen2_vl", "divprune", {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}),
        ("llava_next", "tome", {}),  # merging, newlines between rows, tiles
        ("internvl", "visionzip", {}),  # merging, asks the tower for attention and keys; tiles between other tokens
        ("llava", "random", {"max_num_batched_tokens": 32}),  # drawn from the pixels
    ],
)
def test_a_family_and_a_method(
    tmp_path: Path, pictures: list[Path], family: str, method: str, settings: dict[str, Any]
) -> None:
    vlm, arguments = tiny_vlm(tmp_path, family, method)
    asked = rounds_of(vlm, pictures)
    got = engine.answers(tmp_path / "engine", arguments | {"limit_mm_per_prompt": {"image": 3}, **settings}, asked)
    assert differing(vlm, asked, got) == []
    full = [one["prompt"] for one in engine_lengths(vlm, asked[0])]
    assert all(one["prompt"] < length for one, length in zip(got["rounds"][0], full, strict=True))


def engine_lengths(vlm: PrunedVLM, requests: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Lengths of the unpruned prompts."""
    out = []
    for one in requests:
        batch = vlm.prepare([[Image.open(path) for path in one["images"]]], [one["text"]])
        out.append({"prompt": int(batch.features["attention_mask"].sum())})
    return out


# What is refused ------------------------------------------------------------------------------------------------------


def test_every_family_is_served_or_refused_by_name() -> None:
    vlms = {name for name in BACKBONES.names() if hasattr(BACKBONES.get(name), "splice")}
    assert {name for name in vlms if BACKBONES.get(name).unserved is None} == {*SERVED}
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    assert all(f"`{name}`" in page for name in vlms)


def test_a_method_that_reads_the_question_is_refused_in_front_of_the_engine(tmp_path: Path) -> None:
    base = save_wide(tmp_path / "base", "llava")
    arguments = engine_arguments(model=str(base), method="divprune", keep=5)
    arguments["hf_overrides"]["diffprune"]["method"] = "cdpruner"  # past the command line
    got = engine.answers(tmp_path / "engine", arguments, [])
    assert "'cdpruner' reads the question" in got["refused"]


def test_a_pruner_of_another_base_is_refused(tmp_path: Path) -> None:
    vlm, arguments = tiny_vlm(tmp_path, "llava", "diffprune")
    other = save_wide(tmp_path / "other", "llava")
    vlm.base.model.multi_modal_projector.linear_1.weight.data.mul_(2.0)
    vlm.base.save_pretrained(other)
    got = engine.answers(tmp_path / "engine", arguments | {"model": str(other)}, [])
    assert "refused" in got


# The chat endpoint ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """`diffprune serve` by vLLM, up: its process, its address and what it has written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "diffprune", "serve", "--engine", "vllm", "--pruner", PRUNER, "--keep", "32"]
    line += ["--port", str(port), "--name", "scenes"]
    line += ["--engine-args", "--dtype float32 --enforce-eager --max-model-len 1024"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(line, env=os.environ | engine.ENVIRONMENT, stdout=file, stderr=file)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield process, address, log
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.fixture
def server(served: tuple[Any, str, Path]) -> str:
    """The engine's address."""
    return served[1]


def chat(address: str, text: str, picture: Path, **more: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of one question about one picture, in the API's form."""
    file = io.BytesIO()
    Image.open(picture).save(file, "PNG")
    shown = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": text}]
    body = {
        "model": "scenes",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        **more,
    }
    asked = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_chat_endpoint_answers_as_the_offline_path(server: str, scenes: list[tuple[str, Path]]) -> None:
    vlm = dp.load(PRUNER, keep=32)
    for text, picture in scenes[::10]:
        status, body = chat(server, text, picture)
        assert status == 200
        said = vlm.generate(images=[Image.open(picture)], text=text, max_new_tokens=8)
        assert body["choices"][0]["message"]["content"].strip() == said
        batch = vlm.prepare([[Image.open(picture)]], [text])  # the start token is counted
        assert body["usage"]["prompt_tokens"] == int(batch.features["attention_mask"].sum()) - 576 + 32


def test_a_budget_for_one_request_over_http(server: str, scenes: list[tuple[str, Path]]) -> None:
    text, picture = scenes[0]
    lengths = [
        chat(server, text, picture, mm_processor_kwargs={"keep": keep})[1]["usage"]["prompt_tokens"]
        for keep in (32, 64)
    ]
    assert lengths[1] == lengths[0] + 32
    for keep in (0, -1, "x"):
        status, body = chat(server, text, picture, mm_processor_kwargs={"keep": keep})
        assert status == 400 and f"keep={keep!r}" in json.dumps(body), (status, body)
    assert chat(server, text, picture)[0] == 200


def test_the_engine_ends_in_order_when_the_command_is_told_to(served: tuple[Any, str, Path]) -> None:
    process, address, log = served  # the last test: it is gone afterwards
    process.terminate()
    assert process.wait(120) == 0, log.read_text()[-3000:]
    assert "--served-model-name scenes" in log.read_text(), "the engine's own command line is printed"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/health", timeout=5)


def test_serve_refuses_a_pruner_of_another_base_before_the_engine_starts(tmp_path: Path) -> None:
    vlm, _ = tiny_vlm(tmp_path, "llava", "diffprune")
    vlm.base.model.multi_modal_projector.linear_1.weight.data.mul_(2.0)
    vlm.base.save_pretrained(tmp_path / "llava")  # another model in the place of the pruner's base
    line = [sys.executable, "-m", "diffprune", "serve", "--engine", "vllm", "--pruner", str(tmp_path / "pruner")]
    done = subprocess.run(line, env=os.environ | engine.ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "their vision weights differ" in done.stderr, done.stderr[-3000:]
