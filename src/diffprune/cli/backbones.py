"""`diffprune backbones`: the model families that can be pruned, and named sizes of them."""

from __future__ import annotations

from typing import Any

from diffprune.cli import JsonOption, Wide, announce, collector_at_rest, print_json, print_table


def list_backbones() -> list[dict[str, Any]]:
    """One dict per family with its presets, as `--json` prints it."""
    from diffprune.registry import BACKBONES

    return [
        {
            "family": name,
            "provides": sorted(BACKBONES.get(name).provides),
            "presets": [
                {
                    "name": preset_name,
                    "hub_id": preset.hub_id,
                    "num_visual": preset.num_visual,
                    "note": preset.note,
                }
                for preset_name, preset in BACKBONES.get(name).presets.items()
            ],
        }
        for name in BACKBONES.names()
    ]


def command(
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """List the model families and the presets of each.

    A family is a Hugging Face model_type: any checkpoint of it works. A preset is a real size of it by a short name.

    \b
    Examples:
      diffprune backbones
      diffprune backbones --json
    """
    announce("reading the model families", quiet=as_json)
    with collector_at_rest():
        found = list_backbones()
    if as_json:
        print_json(found)
        return
    rows = []
    for family in found:
        for preset in family["presets"] or [{"name": "", "hub_id": "", "num_visual": "", "note": ""}]:
            rows.append({"family": family["family"], "preset": preset["name"], "weights": preset["hub_id"],
                         "visual tokens": preset["num_visual"], "note": preset["note"]})  # fmt: skip
    print_table(rows, ["preset", "family", "visual tokens", "note", "weights"], wide=wide)
