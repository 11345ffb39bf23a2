"""Recipes of a training: what is set before a config's own values are."""

from typing import Any, Literal

Recipe = Literal["default", "paper", "bridge"]
BRIDGE = ("kept_exact", "standardise")  # options of DiffPrune that are on by default
SURROGATES = ("gumbel_ste", "gumbel_ste-masked")  # what the paper compares with


def is_diffprune(method: object) -> bool:
    """Whether a method is DiffPrune or one of its ablations."""
    return isinstance(method, str) and method.startswith("diffprune")


def default_recipe(method: object) -> Recipe:
    """The recipe of a config that names none: the bridge for DiffPrune, whose own options have it as their default."""
    return "bridge" if is_diffprune(method) else "default"


def recipe_values(recipe: Recipe, method: object) -> dict[str, Any]:
    """What a recipe sets before the file does.

    `paper` has what is printed and nothing else: no warm-up, no clipping, AdamW's weight decay as its library has it,
    none of our additions to the method. `bridge` leads from throttling to dropping: logits are standardised, so
    that the temperature really hardens them, every picture of a step has a temperature of its own, tokens of negligible
    weight leave the training sequence, and a kept token is what will be deployed. `default` sets nothing; of DiffPrune
    it is training without the bridge.
    """
    values: dict[str, Any] = {}
    if recipe == "default" and is_diffprune(method):
        values = {"method": dict.fromkeys(BRIDGE, False)}
    if recipe == "paper":
        values = {"optim": {"warmup": 0, "clip": None, "weight_decay": 0.01}, "remove_below": 0.0}
        if is_diffprune(method):
            values["method"] = {"final_norm": False, "noise": "unit", **dict.fromkeys(BRIDGE, False)}
        elif method in SURROGATES:  # the same scorer and noise, so that the path of the gradient alone differs
            values["method"] = {"final_norm": False, "noise": "unit"}
    if recipe == "bridge":
        values = {"remove_below": 1e-3}
        if is_diffprune(method):
            values |= {"method": dict.fromkeys(BRIDGE, True), "tau": {"drawn": True}}
    return values
