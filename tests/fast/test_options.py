"""Options of compile() and of a compiled generate()."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffprune.fast.options import NotCompiled, greedy_settings, read_decoding
from diffprune.fitting import refuse_compiling
from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import pruned


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_sizes": (0,)}, "batch_sizes holds 0"),
        ({"batch_sizes": 4}, r"batch_sizes=4 is no list; write it as batch_sizes=\(1, 8\)"),
        ({"batch_sizes": None}, "batch_sizes=None is no list"),
        ({"text_buckets": ()}, r"text_buckets=\(\) names nothing; give at least one"),
        ({"text_buckets": "64"}, r"text_buckets='64' is no list; write it as text_buckets=\(64, 128\)"),
        ({"text_buckets": (64, "128")}, "text_buckets holds '128'; give whole numbers"),
        ({"max_new_tokens": 0}, "max_new_tokens holds 0"),
        ({"keep": 0}, "keep=0 keeps nothing"),
        ({"keep": []}, r"keep=\[\] names nothing; give at least one, as in keep=64 or"),
        ({"keep": "64"}, "keep='64' is no list; write it as keep=64 or"),
        ({"image_sizes": []}, r"image_sizes=\[\] names nothing"),
        ({"image_sizes": (336, 336)}, r"image_sizes=\(336, 336\) holds 336, which is no size; write it as .*\[\(336, "),
        ({"image_sizes": [(336, 0)]}, r"holds \(336, 0\), which is no size"),
        ({"image_sizes": 336}, "image_sizes=336 is no list"),
        ({"speed": 9}, "compile\\(\\) has no option 'speed'; it takes keep, "),
    ],
)
def test_bad_sizes_are_named_and_the_reference_path_goes_on(options: dict[str, Any], sentence: str) -> None:
    vlm = pruned("llava", "feature_norm", keep=5)
    with pytest.raises(ValueError, match=sentence):
        vlm.compile(**options)
    assert vlm.fast is None and isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2), str)


def test_settings_that_leave_greedy_decoding_as_it_is_are_taken_and_others_named() -> None:
    model, _ = tiny.build("llava")
    config = model.generation_config
    taken = greedy_settings(config, {"max_new_tokens": 4, "do_sample": False, "top_p": 0.9, "eos_token_id": 7})
    assert taken == {"max_new_tokens": 4, "ends": [7], "pad_id": None}
    for kwargs, sentence in (
        ({"max_new_tokens": 4, "do_sample": True}, "do_sample=True"),
        ({"max_new_tokens": 4, "num_beams": 3}, "num_beams=3"),
        ({"max_new_tokens": 4, "repetition_penalty": 1.05}, "repetition_penalty=1.05"),
        ({"max_new_tokens": 4, "streamer": object()}, "streamer"),
        ({}, "max_new_tokens is not given"),
    ):
        with pytest.raises(NotCompiled, match=sentence):
            greedy_settings(config, kwargs)


def test_ends_are_taken_in_every_form_and_what_transformers_would_fill_in_or_wrap_up_is_left_to_it() -> None:
    config = copy.deepcopy(tiny.build("llava")[0].generation_config)
    for ends in (7, [7], torch.tensor(7), torch.tensor([7])):
        assert greedy_settings(config, {"max_new_tokens": 4, "eos_token_id": ends})["ends"] == [7]
    assert greedy_settings(config, {"max_new_tokens": 4, "return_dict_in_generate": False})["pad_id"] is None
    for steering in ({}, {"do_sample": True}):
        with pytest.raises(NotCompiled, match="pad_token_id=None leaves it to transformers"):
            read_decoding(config, {"max_new_tokens": 4, "pad_token_id": None, **steering})
        config.return_dict_in_generate = True
        with pytest.raises(NotCompiled, match="return_dict_in_generate=True asks for more"):
            read_decoding(config, {"max_new_tokens": 4, **steering})
        config.return_dict_in_generate = None


def test_weights_in_two_precisions_or_on_two_devices_are_refused() -> None:
    model, processor = tiny.build("llava")
    model = copy.deepcopy(model)
    model.model.language_model.to(torch.float16)
    vlm = PrunedVLM(model, processor, method="feature_norm", keep=5)
    with pytest.raises(ValueError, match="needs all weights in one precision, and here are float16 and float32; gen"):
        vlm.compile()
    assert vlm.fast is None

    class Spread(torch.nn.Linear):
        config = model.config

        def parameters(self, recurse: bool = True) -> Any:
            for number in range(2):
                yield SimpleNamespace(
                    device=torch.device("cuda", number), dtype=torch.float16, is_floating_point=lambda: True
                )

    with pytest.raises(ValueError, match="needs all weights on one device, and here are cuda:0 and cuda:1; gen"):
        refuse_compiling(Spread(1, 1))
