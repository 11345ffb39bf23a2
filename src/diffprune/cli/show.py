"""`diffprune show`: a picture with the kept tokens lit and the dropped ones dimmed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import OPTIONS_HELP, announce, choose_device, describe_model, print_json
from diffprune.methods.naming import check_names


def command(
    image: Annotated[Path, typer.Option(help="The picture.")],
    out: Annotated[Path, typer.Option(help="Where to write the PNG.")],
    pruner: Annotated[str, typer.Option(help="Folder or hub id of a saved pruner, or none.")] = "none",
    model: Annotated[
        str | None,
        typer.Option(help="Base model for --pruner none: a folder, a hub id or scenes-nano; default: scenes-llava."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method for --pruner none, or one that takes a saved one's weights (diffprune methods); "
            f"default: feature_norm. {OPTIONS_HELP}"
        ),
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Tokens (64) or a share (0.111).")] = None,
    text: Annotated[str, typer.Option(help="A question, for methods that read it.")] = "",
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Draw the top and bottom of the ranking and how alike their tokens are.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; empty takes a GPU where there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was kept as JSON.")] = False,
) -> None:
    """Draw what a pruner keeps of a picture.

    \b
    Examples:
      diffprune show --pruner runs/llava-k64 --image a.jpg --keep 64 --out kept.png
      diffprune show --method cls_attention --image a.png --keep 64 --out ends.png --matrix
    """
    check_names(method or "")
    if not out.parent.is_dir():
        raise ValueError(f"the folder of {out} does not exist; make it first")
    named = (model or "scenes-llava") if pruner == "none" else pruner
    announce(f"{named}: loading", quiet=as_json)
    from diffprune.api import load_vlm
    from diffprune.atomic import replacing, require_plain
    from diffprune.backbones.processors import open_image
    from diffprune.viz import light_up, save_matrix

    require_plain(out)
    picture = open_image(image)
    where = choose_device(device)
    vlm = load_vlm(pruner, model=model, method=method, keep=keep, device=where, default_method="feature_norm")
    chosen = method or vlm.method.name
    announce(describe_model(named, vlm.base, method=chosen, keep=vlm.budget.keep), quiet=as_json)
    (selection,) = vlm.select([picture], [text])
    found: dict[str, object] = {"method": chosen, "keep": selection.keep.tolist(), "grid": selection.grid}
    if matrix:
        found |= save_matrix(vlm, picture, selection, out)
    else:
        with replacing(out) as new:
            light_up(picture, selection).save(new)
    if as_json:
        print_json({**found, "out": str(out)})
    else:
        print(f"{len(selection.keep)} tokens kept, drawn in {out}")
