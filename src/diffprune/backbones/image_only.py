"""A checkpoint's processor for pictures and text: the stock one, less its video half where that cannot be built.

Every video processor of transformers needs torchvision (SmolVLM's also num2words), and a stock processor with a video
half cannot be built without one. Pictures need neither: transformers has a Pillow image processor for every family.
"""

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, Idefics3Processor, ProcessorMixin
from transformers.models.auto import processing_auto
from transformers.utils.import_utils import is_num2words_available, is_torchvision_available

VIDEO = "video_processor"
_TILED = {"Idefics3Processor": "Idefics3", "SmolVLMProcessor": "SmolVLM"}  # for pictures Idefics3's serves both


def load_processor(name: str | Path, model_type: str, **options: Any) -> Any:
    """The processor in a folder or repository, as transformers loads it; without its video half where it must be.

    Code that lies beside a checkpoint is never run.

    Args:
        options: Of the stock `from_pretrained`: revision, token, cache_dir, ...
    """
    stock = family_processor(model_type)
    kind: Any = AutoProcessor if stock is None or is_whole(model_type) else image_only(stock)
    return kind.from_pretrained(name, **options, trust_remote_code=False)


def family_processor(model_type: str) -> type[ProcessorMixin] | None:
    """The stock processor class of a family; None where transformers knows none."""
    names: Any = processing_auto
    name = names.PROCESSOR_MAPPING_NAMES.get(model_type)
    return None if name is None else names.processor_class_from_name(name)


def is_whole(model_type: str) -> bool:
    """Whether all that the family's stock processor is made of can be built here, its video half included."""
    return is_torchvision_available() and (model_type != "smolvlm" or is_num2words_available())


@cache
def image_only(stock: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The class for pictures and text alone, of the same name, so that it saves what the stock class would read."""
    bases: Any = (stock, _NoVideo)
    if stock.__name__ in _TILED:
        return type(stock.__name__, (_Tiled, Idefics3Processor), {"kind": _TILED[stock.__name__]})
    return type(stock.__name__, bases, {}) if VIDEO in stock.get_attributes() else stock


class _NoVideo(ProcessorMixin):
    """Comes behind the stock class, whose `super().__init__` hands all its parts to this one."""

    def __init__(self, image_processor: Any, tokenizer: Any, video_processor: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts that are loaded and saved."""
        return [name for name in super().get_attributes() if name != VIDEO]


class _Tiled(ProcessorMixin):
    """Names its image processor itself: transformers 5.17 does not find these two without torchvision."""

    kind: str

    @classmethod
    def _get_arguments_from_pretrained(cls, name: Any, processor_dict: Any = None, **kwargs: Any) -> list[Any]:
        family = cls.kind.lower()
        module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
        images = getattr(module, f"{cls.kind}ImageProcessorPil").from_pretrained(name, **kwargs)
        return [images, cls._load_tokenizer_from_pretrained("tokenizer", name, **kwargs)]
