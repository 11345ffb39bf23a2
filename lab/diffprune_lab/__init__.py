"""The laboratory of diffprune: procedural worlds, reference models trained on them, probes, studies and the demo.

It joins the library by entry points (`lab/pyproject.toml`); the library does not know it. Where it is not installed but
on the path, `python -m diffprune_lab ...` is the command line with everything joined.
"""

from diffprune import doors

DOORS = {
    doors.COMMANDS: {"demo": "diffprune_lab.cli.demo", "probe": "diffprune_lab.cli.probe"},
    doors.BACKBONES: {"deit": "diffprune_lab.deit:DeiT"},
    doors.MODELS: {"scenes": "diffprune_lab.models:SCENES"},
    doors.DATA: {"scenes": "diffprune_lab.scenes.data:SceneFeed", "scarce": "diffprune_lab.scarce.data:ScarceFeed"},
    doors.MOVED: {"PrunedClassifier": "diffprune_lab.classifier:PrunedClassifier"},
    doors.TASKS: {
        "scenes": "diffprune_lab.scenes.source:SCENES_TASKS",
        "scarce": "diffprune_lab.scarce.source:SCARCE_TASKS",
    },
}


def join() -> None:
    """Open every door by hand, for an environment in which the lab is not installed."""
    for group, entries in DOORS.items():
        for name, target in entries.items():
            doors.join(group, name, target)
