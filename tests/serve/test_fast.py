"""The server on the compiled path: the same answers, each with its own budget, length and end."""

from typing import Any

from diffprune.serve.rows import Wish
from diffprune.serve.settings import Settings
from diffprune.serve.worker import Answer, Job, Worker
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import compiled

TEXT = "user: <image>what is it?\nassistant: "


def answers(vlm: Any, jobs: list[dict[str, Any]]) -> list[list[Any]]:
    """What the worker tells of jobs that are answered together."""
    worker = Worker(vlm, Settings(batch=4))
    told: list[list[Any]] = [[] for _ in jobs]
    with worker._changed:  # so that all of them wait before the first is taken
        for events, job in zip(told, jobs, strict=True):
            worker._waiting.append(Job(tell=events.append, **job))
        worker._changed.notify()
    worker.stop()
    return told


def test_compiled_rows_say_what_the_reference_path_says() -> None:
    jobs: list[dict[str, Any]] = [
        {"prompt": TEXT, "pictures": [tiny.picture(1)], "keep": 5, "wish": Wish(max_tokens=6), "stream": True},
        {"prompt": TEXT, "pictures": [tiny.picture(2)], "keep": 9, "wish": Wish(max_tokens=2)},
        {"prompt": TEXT, "pictures": [tiny.picture(3)], "wish": Wish(max_tokens=4)},
    ]
    fast = answers(compiled("llava", "divprune", keep=(5, 9), batch_sizes=(1, 4)), jobs)
    slow = answers(pruned("llava", "divprune", keep=5), jobs)
    assert "".join(fast[0][:-1]) == "".join(slow[0][:-1]) == fast[0][-1].text
    for one, other, kept, new in zip(fast, slow, (5, 9, 5), (6, 2, 4), strict=True):
        ours, wanted = one[-1], other[-1]
        assert isinstance(ours, Answer) and ours.text == wanted.text and ours.counts == wanted.counts
        assert ours.num_tokens == wanted.num_tokens == new and ours.batch == 3
        assert (ours.path, wanted.path, ours.counts.kept) == ("fast", "eager", kept)


def test_what_is_drawn_by_one_seed_is_the_same_on_both_paths() -> None:
    jobs: list[dict[str, Any]] = [
        {"prompt": TEXT, "pictures": [tiny.picture(1)], "wish": Wish(max_tokens=5, temperature=1.0, seed=1)},
        {"prompt": TEXT, "pictures": [tiny.picture(2)], "wish": Wish(max_tokens=5)},
        {"prompt": TEXT, "pictures": [tiny.picture(3)], "wish": Wish(max_tokens=3, temperature=0.7, top_p=0.9, seed=2)},
    ]
    fast = answers(compiled("llava", "divprune", keep=5, batch_sizes=(1, 4)), jobs)
    slow = answers(pruned("llava", "divprune", keep=5), jobs)
    for one, other in zip(fast, slow, strict=True):
        assert one[-1].text == other[-1].text and one[-1].num_tokens == other[-1].num_tokens
        assert (one[-1].path, other[-1].path) == ("fast", "eager")
