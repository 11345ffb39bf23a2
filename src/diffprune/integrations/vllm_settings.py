"""What an engine is told of pruning, read and checked, and what cannot be served, refused in one sentence.

Both the command line and the engine's own processes read it here. vLLM is not imported.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from diffprune.backbones.base import Backbone
from diffprune.fitting import POSITIONS, refuse_full_budget, require_family
from diffprune.integrations.vllm import KEY
from diffprune.methods.base import Pruner
from diffprune.methods.options import make_options, parse_method, require_choice_of, require_weights
from diffprune.registry import METHODS
from diffprune.saved_pruners import local_pruner
from diffprune.saving import load_pruner
from diffprune.types import Budget

NEWLINES = ("all", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What stands under `diffprune` in the model's configuration.

    Args:
        pruner: Folder or hub id of a saved pruner; None: `method` by its name.
        method: With options in brackets; beside a pruner one that takes its weights.
        keep: Tokens, or a share, of each picture, where a request does not say; default: the pruner's largest, or all.
        positions: "original" or "packed".
        newline: "all" or "none", in families with newline tokens.
        allow_other_base: Take a pruner that was trained on another base.
    """

    pruner: str | None = None
    method: str | None = None
    keep: int | float | None = None
    positions: str = "original"
    newline: str = "all"
    allow_other_base: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> "Settings":
        """The settings as given; a `ValueError` where one is unknown or none."""
        known = [field.name for field in fields(cls)]
        for key in given or {}:
            if key not in known:
                raise ValueError(f"{KEY}.{key} is no setting; there are {', '.join(known)}")
        settings = cls(**(given or {}))
        if settings.keep is not None:
            Budget(settings.keep)
        if settings.positions not in POSITIONS:
            raise ValueError(f"positions={settings.positions!r} is unknown; choose {' or '.join(POSITIONS)}")
        if settings.newline not in NEWLINES:
            raise ValueError(
                f"newline={settings.newline!r} cannot be served: placeholders are counted before a picture is looked "
                "at, and with 'rows' their number depends on what is kept; choose all or none"
            )
        if settings.pruner is None and settings.method is not None:
            require_weights(parse_method(settings.method).name)
        if settings.pruner is None and (settings.method is None or parse_method(settings.method).name == "full"):
            refuse_full_budget(settings.keep)  # all tokens would come to fewer placeholders
        return settings

    def written(self) -> dict[str, Any]:
        """Those that differ from the defaults, as they stand in the configuration."""
        usual = asdict(type(self)())
        return {key: value for key, value in asdict(self).items() if value != usual[key]}


def deployed_name(settings: Settings) -> str:
    """The method that chooses, without its options."""
    if settings.method is not None:
        return parse_method(settings.method).name
    return "full" if settings.pruner is None else read_pruner(settings.pruner)[1]["method"]["name"]


def rounding_of(settings: Settings) -> str:
    """How a share becomes a count (`Budget.rounding`): some releases round down, and so do their methods here."""
    if settings.method is not None:
        named = parse_method(settings.method)
        name, options = named.name, named.options
    elif settings.pruner is not None:
        method = read_pruner(settings.pruner)[1]["method"]
        name, options = method["name"], method["options"]
    else:
        return "nearest"
    kind, made = METHODS.get(name), make_options(name, options)
    return kind.native_rounding if getattr(made, "native", False) else "nearest"


def read_pruner(pruner: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a saved pruner and its config."""
    return load_served(pruner)[:2]


def load_served(pruner: str) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """The folder, the config and the weights of a saved pruner that can be served."""
    folder, restore = local_pruner(pruner)
    config, state = load_pruner(folder, restore=restore)
    if config.get("budget", "global") != "global":
        raise ValueError(
            f"{pruner} spends its budget tile by tile, which cannot be served; change its budget to global in "
            "config.json, and measure it again"
        )
    return folder, config, state


def refuse_method(method: Pruner | type[Pruner], name: str) -> None:
    """An error for a method whose tokens the engine could not count or keep apart."""
    if method.is_inside:
        raise ValueError(
            f"method {name!r} drops inside the language model, which is the engine's own; "
            "serve one that chooses before it (`diffprune methods`)"
        )
    if "text" in method.needs:
        raise ValueError(
            f"method {name!r} reads the question, and the engine keeps a picture's tokens for every question about "
            "it; serve one that looks at the picture alone (`diffprune methods`)"
        )
    if not method.is_exact and name != "full":
        raise ValueError(
            f"method {name!r} decides by the picture how many tokens stay, and the engine counts them before it looks "
            "at one; serve one that keeps exactly K (`diffprune methods`)"
        )


def refuse_family(family: type[Backbone]) -> None:
    """An error for a family that the engine cannot serve."""
    if why := family.unserved:
        raise ValueError(f"the {family.family} family cannot be served by vLLM: {why}")


def chosen_kind(settings: Settings, family: type[Backbone], config: Any) -> Pruner | type[Pruner]:
    """The method that will choose, as far as it is known before there is a model: built, or its class if it learns."""
    trained = None if settings.pruner is None else read_pruner(settings.pruner)[1]["method"]["name"]
    named = parse_method(settings.method or trained or "full")
    if trained is not None:
        require_choice_of(named, trained)
    return named.kind if named.kind.trained else named.build(block=family.tower_block(config))


def served_settings(config: Any, *, uses_mrope: bool) -> Settings:
    """The settings in a model's configuration; an error where the engine cannot serve what they ask for.

    Args:
        uses_mrope: Whether the engine keeps three rows of positions.
    """
    settings = Settings.read(getattr(config, KEY, None))
    family = require_family(config.model_type)
    refuse_family(family)
    refuse_method(chosen_kind(settings, family, config), deployed_name(settings))
    refuse_rules(settings, family, uses_mrope=uses_mrope)
    return settings


def refuse_rules(settings: Settings, family: type[Backbone], *, uses_mrope: bool, num_shards: int = 1) -> None:
    """An error where an engine is not set up for what it is asked.

    Args:
        uses_mrope: Whether the engine keeps three rows of positions.
        num_shards: Of the model over processes.
    """
    if num_shards > 1:
        raise ValueError(
            f"tensor_parallel_size={num_shards} would spread the vision tower over processes, which is not supported; "
            "use 1, and data_parallel_size for more GPUs"
        )
    if settings.positions == "original" and family.plain_positions and not uses_mrope:
        raise ValueError(
            "original positions need three rows of them in the engine: add text_config.rope_parameters.mrope_section "
            "to --hf-overrides as `diffprune serve --dry-run` prints it, or say positions=packed"
        )


def rope_sections(config: Any) -> list[int]:
    """Three parts of half a head: what makes vLLM keep three rows of positions for a model that turns by one number.

    The sizes of the parts are used by nothing: the model itself turns by the first row.
    """
    text = config.get_text_config()
    half = (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]
