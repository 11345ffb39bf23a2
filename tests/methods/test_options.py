"""Methods named with their options in one text."""

import dataclasses
import typing

import pytest

from diffprune.methods.naming import split_methods
from diffprune.methods.options import parse_method, read_value
from diffprune.registry import METHODS


def test_a_plain_name_has_no_options() -> None:
    named = parse_method("fastv")
    assert (named.label, named.name, named.options) == ("fastv", "fastv", {})
    assert parse_method(" fastv[layer=3] ").label == "fastv[layer=3]"  # as split_methods gives it


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("fastv[layer=3;budget=average]", {"layer": 3, "budget": "average"}),
        ("visionzip[native=true]", {"native": True}),
        ("visionzip[native=False]", {"native": False}),
        ("visionzip[contextual=4]", {"contextual": 4}),
        ("visionzip[contextual=0.25]", {"contextual": 0.25}),
        ("pyramiddrop[layers=2,4,6; ratios=0.5,0.25,0.1]", {"layers": (2, 4, 6), "ratios": (0.5, 0.25, 0.1)}),
        ("holov[crops=none]", {"crops": None}),
        ("sparsevlm[version=1.5]", {"version": "1.5"}),
        ("centre[native=true]", {"native": True}),
    ],
)
def test_values_have_the_type_of_the_option(text: str, options: dict[str, object]) -> None:
    named = parse_method(text)
    assert named.label == text and named.options == options
    assert [type(value) for value in named.options.values()] == [type(value) for value in options.values()]


def test_the_method_is_built_with_its_options_and_those_beside_give_way() -> None:
    built = parse_method("random[seed=5]").build(seed=1)
    assert built.name == "random" and built.options.seed == 5
    assert parse_method("random").build(seed=1).options.seed == 1


def test_commas_separate_methods_but_not_in_brackets() -> None:
    assert split_methods("full, pyramiddrop[layers=2,4,6],,fastv,full") == [
        "full",
        "pyramiddrop[layers=2,4,6]",
        "fastv",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fastvv[layer=3]", "unknown method 'fastvv'; did you mean fastv"),
        ("fastv[layr=3]", r"'fastv' has no option 'layr'; did you mean layer \(of layer, budget\)"),
        ("fastv[colour=red]", "'fastv' has no option 'colour'; it takes layer, budget"),
        ("centre[colour=red]", "'centre' has no option 'colour'; it takes none"),
        ("fastv[layer=two]", "option 'layer' of method 'fastv' takes a whole number, not 'two'"),
        ("fastv[budget=half]", "budget='half' is not known; give one of exact, average"),
        (f"fastv[budget={'half' * 500}]", "budget='halfhalf[half]{71} is not known; give one of exact, average"),
        ("visionzip[native=1]", "option 'native' of method 'visionzip' takes true or false, not '1'"),
        ("pyramiddrop[layers=a,b]", "takes numbers separated by commas or none, not 'a,b'"),
        ("fastv[layer=2;layer=3]", "has option 'layer' twice"),
        ("fastv[layer]", "'layer' in method .* is no option with a value; write NAME"),
        ("fastv[]", "is no option with a value; write NAME"),
        ("fastv[layer=2", "cannot be read; write NAME"),
        ("fastv[layer=2]x", "cannot be read; write NAME"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_way_out(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        parse_method(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", METHODS.names())
def test_every_option_of_every_method_can_be_written(name: str) -> None:
    """The default of an option, written as a text, is read as itself: a new type of option has to be added here."""
    kinds = typing.get_type_hints(METHODS.get(name).Options)
    for field in dataclasses.fields(METHODS.get(name).Options):
        value = field.default
        written = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        assert read_value(written, kinds[field.name]) == value
