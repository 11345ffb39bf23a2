"""`diffprune show`: what methods keep of a picture, drawn over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffprune.cli import (
    OPTIONS_HELP,
    DeviceOption,
    JsonOption,
    ModelOption,
    PrunerOption,
    announce,
    choose_device,
    collector_at_rest,
    describe_model,
    print_json,
    require_file,
)
from diffprune.methods.naming import check_names, split_methods

if TYPE_CHECKING:
    from diffprune.model import PrunedVLM


def command(
    image: Annotated[Path, typer.Option(help="The picture.")],
    out: Annotated[Path, typer.Option(help="Where to write the drawing: .png, .jpg, .webp or .svg.")],
    pruner: PrunerOption = "none",
    model: ModelOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Methods (diffprune methods), comma-separated: several make a sheet. Beside a saved pruner those that "
            f"take its weights or need none; default: its own, else feature_norm. {OPTIONS_HELP}"
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Tokens (64) or a share (0.111), comma-separated: several make a sheet.")
    ] = None,
    text: Annotated[str, typer.Option(help="A question, for methods that read it.")] = "",
    heat: Annotated[
        bool, typer.Option("--heat", help="Colour every token by its score; kept ones have a white line around them.")
    ] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Draw the top and bottom of the ranking and how alike their tokens are.")
    ] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Draw what a pruner keeps of a picture: kept tokens lit, the others dimmed, what no token sees striped.

    Several methods or budgets become one sheet, a row for each method where there are several budgets. A model that
    sees a picture whole and in tiles has a drawing for each.

    \b
    Examples:
      diffprune show --pruner runs/llava-k64 --image a.jpg --keep 64 --out kept.png
      diffprune show --method divprune,gots,random --image a.png --keep 64,32,16 --out sheet.svg
      diffprune show --pruner runs/llava-k64 --image a.jpg --keep 64 --heat --out scores.png
      diffprune show --method cls_attention --image a.png --keep 64 --out ends.png --matrix
    """
    check_names(method or "")
    if not out.parent.is_dir():
        raise ValueError(f"the folder of {out} does not exist; make it first")
    names = split_methods(method or "")
    if matrix and (heat or len(names) > 1 or "," in (keep or "")):
        raise ValueError("--matrix is a drawing of one method at one budget; leave --heat and further ones out")
    named = (model or "scenes-llava") if pruner == "none" else pruner
    announce(f"{named}: loading", quiet=as_json)
    with collector_at_rest():
        from diffprune.backbones.processors import open_image
        from diffprune.types import parse_budgets
        from diffprune.viz import Panel, draw, save_matrix
        from diffprune.viz.sheet import check_ending

        check_ending(out)
        require_file(out)
        picture = open_image(image)
        budgets: list[int | float | None] = [*parse_budgets(keep)] if keep else [None]
        vlms = _models(pruner, model, names, budgets[0], choose_device(device))
    first, *_ = vlms.values()
    announce(describe_model(named, first.base, method=", ".join(vlms), keep=keep or first.budget.keep), quiet=as_json)
    panels, found = [], []
    for name, vlm in vlms.items():
        # All tokens are kept whatever the budget is, so once is enough.
        for budget in budgets if vlm.method.name != "full" else [None]:
            (selection,) = vlm.select([picture], [text], keep=budget)
            if heat and selection.logits is None:
                raise ValueError(f"method {name!r} has no score for each token to colour; leave it or --heat out")
            panels.append(Panel(name, selection))
            found.append({"method": name, "keep": selection.keep.tolist(), "grid": selection.grid})
    means = {}
    if matrix:
        means = save_matrix(first, picture, panels[0].selection, out)
    else:
        draw(picture, panels, out, heat=heat, across=len(budgets) if len(budgets) > 1 else None)
    if as_json:
        print_json({**(found[0] if len(found) == 1 else {"panels": found}), **means, "out": str(out)})
    else:
        kept = ", ".join(str(len(panel.selection.keep)) for panel in panels)
        print(f"{kept} tokens kept, drawn in {out}")


def _models(
    pruner: str, model: str | None, names: list[str], keep: int | float | None, device: str
) -> dict[str, PrunedVLM]:
    """The model with each of the methods around it, by the names they were asked for with."""
    from diffprune.api import load_vlm
    from diffprune.evaluate.pruners import takes_weights
    from diffprune.methods.options import deployed_as, parse_method, require_weights

    given = None if keep is None else str(keep)
    if pruner == "none":
        names = names or ["feature_norm"]
        for name in names:
            require_weights(parse_method(name).name)
        chooses = next((name for name in names if name != "full"), "full")  # `full` takes no budget
        first = load_vlm("none", model=model, method=chooses, keep=given, device=device)
        return {name: first if name == chooses else _with(first, name) for name in names}
    first = load_vlm(pruner, model=model, keep=given, device=device)
    trained = first.method.trained_as[0] if first.method.trained_as else first.method
    out: dict[str, PrunedVLM] = {}
    for name in names or [first.method.name]:
        if takes_weights(name, trained):
            out[name] = first.with_method(deployed_as(trained, first.artefact.get("choice"), name))
        elif name == first.method.name:
            out[name] = first
        else:
            require_weights(parse_method(name).name)
            out[name] = _with(first, name)
    return out


def _with(vlm: PrunedVLM, name: str) -> PrunedVLM:
    """The same model with another method around it, which needs no weights."""
    return vlm.with_method(name, keep=1.0 if name == "full" else None)
