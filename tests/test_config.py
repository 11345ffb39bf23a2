import dataclasses

import pytest
import yaml

from diffprune.config import (
    RunConfig,
    differences,
    load_config,
    make_config,
    parse_override,
    to_yaml,
)
from diffprune.methods.diffprune import DiffPruneOptions
from diffprune.methods.options import build_method, make_options
from diffprune.model import PrunedVLM
from diffprune.recipes import BRIDGE, default_recipe
from diffprune.registry import BACKBONES, METHODS
from tests import tiny

MINIMAL = {"backbone": {"name": "llava"}, "budget": {"keep": 64}, "data": {"name": "pictures"}}


def configs(root, folder="configs"):
    return sorted(path for path in (root / folder).glob("*/*.yaml") if path.parent.name != "accelerate")


def test_the_defaults_are_the_papers_numbers():
    config = make_config(MINIMAL)
    assert (config.optim.lr, config.optim.batch_size, config.optim.accumulate) == (2e-4, 4, 4)
    assert (config.tau.start, config.tau.end, config.tau.anneal_steps) == (2.0, 0.1, 2000)
    assert config.seed == 42 and config.method.name == "diffprune"


def test_the_paper_recipe_adds_nothing_to_what_is_printed():
    config = make_config({**MINIMAL, "recipe": "paper"})
    assert (config.optim.warmup, config.optim.clip, config.optim.weight_decay) == (0, None, 0.01)
    options = DiffPruneOptions(**config.method.options)
    assert (options.noise, options.final_norm, options.standardise, options.kept_exact) == ("unit", False, False, False)


def test_the_paper_recipe_gives_other_methods_no_options_of_ours():
    config = make_config({**MINIMAL, "recipe": "paper", "method": {"name": "visionselector"}})
    assert config.method.options == {}


@pytest.mark.parametrize("name", ["gumbel_ste", "gumbel_ste-masked"])
def test_by_the_paper_recipe_the_surrogate_has_the_scorer_and_the_noise_of_diffprune(name):
    ours, theirs = (
        make_options(method, make_config({**MINIMAL, "recipe": "paper", "method": {"name": method}}).method.options)
        for method in ("diffprune", name)
    )
    for shared in ("scorer", "scorer_depth", "final_norm", "noise", "response"):
        assert getattr(ours, shared) == getattr(theirs, shared)


def test_a_run_of_a_surrogate_from_before_goes_on_with_the_norm_it_had(tmp_path):
    config = make_config({**MINIMAL, "recipe": "paper", "method": {"name": "gumbel_ste"}})
    text = to_yaml(config)
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml") == config
    (tmp_path / "run.yaml").write_text(text.replace("  final_norm: false\n", "").replace("  noise: unit\n", ""))
    assert load_config(tmp_path / "run.yaml").method.options == {"final_norm": True, "noise": "unit"}


def test_a_file_wins_over_its_recipe_and_an_override_over_the_file():
    values = {**MINIMAL, "recipe": "paper", "optim": {"clip": 0.5, "lr": 1e-3}}
    config = make_config(values, ["optim.lr=1e-4"])
    assert (config.optim.clip, config.optim.lr, config.optim.warmup) == (0.5, 1e-4, 0)


def test_every_family_that_writes_has_one_config_to_start_from_by_the_papers_recipe(root):
    found = configs(root)
    assert {path.parent.name for path in found} == set(BACKBONES.names()) - {"deit"}  # which classifies
    assert len({path.parent.name for path in found}) == len(found)
    for path in found:
        config = load_config(path)
        assert config.recipe == "paper"
        assert config.optim.lr == 2e-4 and config.optim.batch_size * config.optim.accumulate == 16
        assert config.tau.anneal_steps == 2000 and config.seed == 42
        METHODS.get(config.method.name).Options(**config.method.options)  # every option is one the method has
        assert path.stem == f"{config.method.name}_k{config.budget.keep}"
        presets = BACKBONES.get(path.parent.name).presets  # the folder is the family
        assert presets[config.backbone.name].hub_id == config.backbone.weights


def test_the_bridge_removes_tokens_and_keeps_kept_ones_exact():
    config = make_config({**MINIMAL, "recipe": "bridge"})
    assert config.remove_below == 1e-3 and config.method.options == {"kept_exact": True, "standardise": True}
    assert config.tau.drawn and not make_config({**MINIMAL, "recipe": "paper"}).tau.drawn
    assert make_config({**MINIMAL, "recipe": "bridge", "method": {"name": "gumbel_ste"}}).method.options == {}
    assert make_config({**MINIMAL, "recipe": "default"}).remove_below == 0.0


def test_diffprune_is_by_the_bridge_where_nothing_is_said_and_other_methods_are_not():
    bridge = make_config({**MINIMAL, "recipe": "bridge"})
    assert make_config(MINIMAL) == make_config(MINIMAL, ["recipe=null"]) == bridge
    assert make_config(MINIMAL, ["method.name=diffprune-scale"]).recipe == "bridge"
    other = make_config(MINIMAL, ["method.name=gumbel_ste"])
    assert (other.recipe, other.remove_below, other.method.options) == ("default", 0.0, {})
    assert make_config(MINIMAL, ["recipe=default"]).method.options == {"kept_exact": False, "standardise": False}
    assert "recipe: bridge" in to_yaml(make_config(MINIMAL)) and "recipe: default" in to_yaml(other)


@pytest.mark.parametrize("name", ["diffprune", "diffprune-scale", "diffprune-global"])
def test_a_method_by_its_name_alone_has_the_options_of_a_config_without_a_recipe(name):
    config = make_config(MINIMAL, [f"method.name={name}"])
    alone = PrunedVLM(*tiny.build("llava"), method=name).method
    configured = build_method(name, block=alone.block, **config.method.options)
    assert config.recipe == default_recipe(name) == "bridge"
    assert alone.options == configured.options == dataclasses.replace(alone.options, **dict.fromkeys(BRIDGE, True))
    for recipe in ("default", "paper"):  # and these are something else
        options = make_config(MINIMAL, [f"method.name={name}", f"recipe={recipe}"]).method.options
        assert build_method(name, block=alone.block, **options).options != alone.options


def test_bad_temperatures_are_refused_and_one_that_was_found_by_itself_is_gone():
    for tau, words in (
        ({"start": "auto"}, r"tau.start is 'auto', which is no longer there: .* give a number, such as 2.0"),
        ({"start": "aut"}, "tau.start is 'aut': must be a number"),
        ({"start": 0.0}, "tau.start is 0.0: must be above 0"),
        ({"start": 0.5, "end": 0.6}, "tau.end is 0.6: must be above 0 and at most start, 0.5"),
    ):
        with pytest.raises(ValueError, match=words):
            make_config({**MINIMAL, "tau": tau})


def test_a_run_of_before_temperatures_were_drawn_goes_on_without(tmp_path):
    text = to_yaml(make_config(MINIMAL)).replace("  drawn: true\n", "")
    for name, drawn in (("run.yaml", False), ("own.yaml", True)):
        (tmp_path / name).write_text(text)
        assert load_config(tmp_path / name).tau.drawn is drawn


def test_settings_that_are_gone_are_read_where_they_did_nothing_and_refused_where_not():
    """A run.yaml of an earlier version names them all."""
    old = {**MINIMAL, "hardness": 0.0, "hardness_ramp": 1.0}
    assert make_config(old) == make_config(MINIMAL) and differences(make_config(old), make_config(MINIMAL)) == []
    with pytest.raises(ValueError, match=r"^hardness is 2\.0: the hardness loss is no longer there .*; set it to 0"):
        make_config({**old, "hardness": 2.0})


def test_a_change_is_shown_by_its_key():
    before, after = make_config(MINIMAL), make_config(MINIMAL, ["optim.lr=1e-4", "method.noise=unit"])
    assert differences(before, before) == []
    assert differences(before, after) == ["optim.lr: 0.0002 -> 0.0001", "method.noise: None -> 'unit'"]


def test_the_resolved_config_reads_back_equal(root, tmp_path):
    for path in configs(root):
        config = load_config(path, ["method.own_option=[1, 2]", "budget.keep=null", "budget.range=[0.05, 1.0]"])
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_config(tmp_path / "config.yaml") == config


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config(MINIMAL).seed = 1  # type: ignore[misc]


def test_options_of_the_method_stand_beside_its_name():
    values = {**MINIMAL, "recipe": "default", "method": {"name": "diffprune", "noise": "unit"}}
    config = make_config(values, ["method.scorer_depth=3"])
    assert {"noise": "unit", "scorer_depth": 3}.items() <= config.method.options.items()
    assert make_config(values, ["method.name=gumbel_ste"]).method.options == {"noise": "unit"}


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("2E+3", 2000.0), ("64", 64), ("1.0", 1.0), ("null", None)]
)
def test_an_override_is_read_as_people_write_numbers(text, value):
    parsed = parse_override(f"optim.lr={text}")["optim"]["lr"]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", "unknown key optim.learning_rate"),
        ("optim.batchsize=1", "did you mean optim.batch_size"),
        ("optin.lr=1", "did you mean optim"),
        ("seeed=1", "did you mean seed"),
        ("optim.lr=fast", "optim.lr is 'fast': must be a number"),
        ("optim.lr=.inf", "optim.lr is inf"),
        ("optim.lr=0", "optim.lr is 0.0: must be above 0"),
        ("optim.batch_size=2.5", "optim.batch_size is 2.5: must be an integer"),
        ("optim.batch_size=true", "optim.batch_size is True"),
        ("optim.clip=-1", "optim.clip is -1.0: must be above 0"),
        ("optim=3", "optim is 3: must be a mapping"),
        ("optim.warmup=1.5", "optim.warmup is 1.5"),
        ("backbone.dtype=int8", "backbone.dtype is 'int8': must be 'float32' or"),
        ("backbone.name=null", "backbone.name is None: must be a text"),
        ("budget.keep=0", "budget.keep=0"),
        ("budget.keep=1.5", "budget.keep=1.5"),
        ("budget.range=[16, 128]", "give one and set the other to null"),
        ("tau.end=3.0", "tau.end is 3.0"),
        ("data.share=0", "data.share is 0"),
        ("remove_below=0.5", "remove_below is 0.5"),
        (
            "backbone.dtype=float16",
            "torch does not mix the two; set backbone.dtype=bfloat16 or optim.precision=float32",
        ),
        ("seed=18446744073709551616", "seed is 18446744073709551616: must be an integer of 64 bits"),
        ("validation.every=0", "validation.every is 0"),
        ("validation.choose_by=luck", "validation.choose_by is 'luck'"),
        ("saving.keep=0", "saving.keep is 0"),
        ("recipe=mine", "recipe is 'mine': must be 'default' or 'paper' or 'bridge'"),
        ("optim.lr", "not of the form key.name=value"),
        ("=1", "not of the form key.name=value"),
        ("optim.lr=[", "is not YAML"),
    ],
)
def test_a_bad_override_is_refused_with_its_key_and_value(override, message):
    with pytest.raises(ValueError) as error:
        make_config(MINIMAL, [override])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("low_high", ["[128, 16]", "[16, 0.5]", "[16]", "[0, 16]", "16"])
def test_a_bad_range_is_refused(low_high):
    with pytest.raises(ValueError, match=r"range|keep"):
        make_config(MINIMAL, ["budget.keep=null", f"budget.range={low_high}"])


def test_a_missing_section_is_named():
    with pytest.raises(ValueError, match="budget is missing"):
        make_config({"backbone": {"name": "llava"}})
    with pytest.raises(ValueError, match=r"data.name is missing: add it to the file or give data.name="):
        make_config({key: value for key, value in MINIMAL.items() if key != "data"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "key seed is given twice, again on line 2"),
        ("- 1\n", "a config is a mapping"),
        ("a: [1\n", "is not YAML"),
        ("!!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_config(path)
    assert "bad.yaml" in str(error.value) and message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read config .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_the_yaml_is_plain(root):
    values = yaml.safe_load(to_yaml(make_config(MINIMAL)))
    assert set(values) == {field.name for field in dataclasses.fields(RunConfig)}


def test_aliases_of_aliases_are_refused_at_the_first_one(tmp_path):
    """Each level is ten times the one before: built, the last would hold ten billion values."""
    with pytest.raises(ValueError, match=r"the alias \*a on line 1 is not taken"):
        parse_override("optim.lr=[&a 1, *a]")
    levels = ["l0: &l0 [1, 1]"] + [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 11)]
    (tmp_path / "bomb.yaml").write_text("\n".join(levels))
    with pytest.raises(ValueError, match=r"bomb\.yaml: the alias \*l0 on line 2 is not taken; write the value out"):
        load_config(tmp_path / "bomb.yaml")
