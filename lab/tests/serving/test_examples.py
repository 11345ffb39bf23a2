"""Examples of the page: one that ships, and those that the lab's task sources bring."""

import base64

from diffprune.backbones.processors import open_image
from diffprune.evaluate import sources
from diffprune.model import PrunedVLM
from diffprune.serve import examples
from lab.tests import tiny_scenes


def test_installed_task_sources_bring_pictures_and_questions(monkeypatch) -> None:
    vlm = PrunedVLM(*tiny_scenes.always_says("yes"))
    found = examples.find_examples(vlm)
    assert found[0]["name"] == "a sign" and len(found) == examples.MOST + 1
    assert {example["name"].partition("/")[0] for example in found[1:]} <= {"scenes", "scarce"}
    for example in found:
        picture = open_image(base64.b64decode(example["image"].partition(",")[2]))
        assert min(picture.size) > 8 and example["question"]

    class Broken:
        def names(self) -> list[str]:
            raise RuntimeError("broken")

    monkeypatch.setattr(examples, "task_sources", lambda: {"broken": Broken()})
    assert [example["name"] for example in examples.find_examples(vlm)] == ["a sign"]
    assert sources.task_sources() != {}
