"""The lab's configs: one for each reference model."""

from pathlib import Path

from diffprune.config import load_config
from diffprune.methods.diffprune import DiffPruneOptions


def test_the_configs_of_scenes_train_what_their_names_say(root: Path) -> None:
    found = sorted((root / "lab" / "configs").rglob("*.yaml"))
    assert len(found) == 5
    for path in found:
        config = load_config(path)
        folder = path.parent.name  # a reference model that comes with the lab, or a family and a folder of weights
        shipped = config.backbone.name == folder.replace("_", "-")
        family = config.backbone.name.startswith(folder.removeprefix("scenes_")) and config.backbone.weights
        assert shipped or family
        assert config.data.name == folder.partition("_")[0]
        assert config.optim.steps and config.optim.precision == "float32"
        DiffPruneOptions(**config.method.options)
        assert (path.stem, config.recipe) == ("diffprune_any", "bridge") and config.budget.range
