"""A smaller picture against methods without training: the study's table of two models, one that cannot be shrunk."""

import json
from pathlib import Path

from diffprune_lab.scenes.sizes import SIZES_FILE
from diffprune_lab.studies import downscale
from lab.tests import tiny_sized


def saved(folder: Path, family: str) -> str:
    model, processor = tiny_sized.build(family)
    model.save_pretrained(folder / family)
    processor.save_pretrained(folder / family)
    (folder / family / SIZES_FILE).write_text(json.dumps({"sizes": tiny_sized.WAYS[family]}))
    return f"{family}={folder / family}"


def test_every_model_has_its_rows_and_what_cannot_be_shrunk_is_told(tmp_path: Path) -> None:
    out = tmp_path / "scenes_downscale.json"
    models = [word for family in tiny_sized.WAYS for word in ("--model", saved(tmp_path, family))]
    told = ["--methods", "random", "--keep", "0.2222", "--seeds", "0", "--questions", "1", "--device", "cpu"]
    downscale.main([*models, *told, "--out", str(out)])
    written = json.loads(out.read_text())
    of_a_task = {(row["backbone"], row["method"]): row for row in written["rows"] if row.get("task") == "scenes/gqa"}
    assert set(of_a_task) == {
        *(("qwen2_5_vl", method) for method in ("full", "random", "downscale")),
        *(("llava_next", method) for method in ("full", "random")),
    }
    full, dropped, smaller = (of_a_task["qwen2_5_vl", method] for method in ("full", "random", "downscale"))
    assert smaller["num_kept"] <= dropped["num_kept"] < full["num_kept"] and smaller["first_token_kl"] > 0
    assert smaller["prompt_tokens"] <= dropped["prompt_tokens"] < full["prompt_tokens"]
    assert "llava_next: downscale has no row at keep=0.2222" in written["notes"]
    assert "questions are hard at keep=0.2222, too few" in written["notes"]


def test_the_default_is_every_method_without_training_before_the_language_model() -> None:
    names = downscale.before_the_language_model()
    assert names[:2] == ["random", "uniform_grid"] and len(names) == len(set(names)) > 10
    assert not {"full", "fastv", "diffprune"} & set(names)
    assert "fastervlm" in names and "cls_attention" not in names  # one rule
