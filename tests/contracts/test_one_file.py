"""A model family is one file: nothing outside `backbones/` decides by a family's name."""

import ast
import importlib
from pathlib import Path

import pytest

import diffprune
from diffprune.registry import BACKBONES
from tests.contracts.test_backbones import FAMILIES
from tests.contracts.vlm import pruned

PACKAGE = Path(diffprune.__file__).parent
# Files that may name a family, and why. A table or a switch by family is never a reason: make it an attribute of
# `Backbone` instead.
MAY_NAME = {
    "fast/study.py": "parts of a study on one model",
}


def names_in(source: str) -> list[tuple[int, str]]:
    """Line and value of every string that is exactly the name of a family."""
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [(node.lineno, node.value) for node in constants if node.value in set(BACKBONES.names())]


def test_no_file_outside_backbones_names_a_family() -> None:
    named = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(PACKAGE / "backbones") and (found := names_in(path.read_text(encoding="utf-8")))
    }
    assert {path: found for path, found in named.items() if path not in MAY_NAME} == {}


def test_a_table_and_a_switch_by_family_are_found() -> None:
    assert names_in('SIZES = {"llava": 1, "clip": 2}\nif family == "qwen2_5_vl":\n    pass\n') == [
        (1, "llava"),
        (2, "qwen2_5_vl"),
    ]


def test_the_compiled_towers_that_families_name_are_there() -> None:
    named = {family: BACKBONES.get(family).compiled_tower for family in FAMILIES}
    assert {family for family, path in named.items() if path} == {
        *("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
    }
    for path in filter(None, named.values()):
        module, name = path.split(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reads_the_blocks_of_its_tower_off_the_config_alone(family: str) -> None:
    backbone = pruned(family).backbone
    spec = type(backbone).tower_block(backbone.config)
    assert type(backbone).tower_block(backbone.config.vision_config) == spec
    weights = {
        parameter.shape[-1] for module in backbone.vision_modules().values() for parameter in module.parameters()
    }
    assert {spec.width, spec.mlp_width} <= weights
