"""Writes a trained `scarce-llava` in the hub's layout, to be frozen.

    python -m diffprune_lab.scarce.package --trained out/language --out lab/diffprune_lab/assets/scarce-llava

The weight files are copied byte for byte, so that what was accepted is what ships.
"""

import argparse
import shutil
from pathlib import Path

from diffprune_lab.pretrain.package import read_log, weight_files
from diffprune_lab.scarce import reference
from diffprune_lab.scarce.digest import frozen_digest
from diffprune_lab.scenes.reference import CHECKSUMS, checksums


def package(trained: Path, out: Path) -> None:
    """Stock configuration and processor, the weights as they are, their checksums, and a card made from the log."""
    model, processor = reference.load_scarce(reference.NAME, trained)
    out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = "bfloat16"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    processor.save_pretrained(out)
    for path in weight_files(trained):
        shutil.copyfile(path, out / path.name)
    (out / CHECKSUMS).write_text(checksums(out))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    (out / "README.md").write_text(card(parameters, read_log(trained), frozen_digest(out)), encoding="utf-8")


def card(parameters: int, log: list[dict], digest: str) -> str:
    """The card of the model; every figure is read from the log of its language stage."""
    last = [entry for entry in log if "pictures" in entry][-1]
    full = [entry for entry in log if entry.get("check") == "full"][-1]
    right = ", ".join(f"{kind} {100 * share:.1f}" for kind, share in full["right"].items())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# {reference.NAME}

A LLaVA in miniature, trained from scratch on the scarce world of diffprune: {parameters:,} parameters in bfloat16,
576 visual tokens of a 192 px picture. It knows these pictures and nothing else. Frozen: its digest, with the code of
the world, is {digest}.

```python
import diffprune as dp

vlm = dp.load("{reference.NAME}", method="gots", keep=64)
```

Trained by `runs/train_scarce.sh chain`; the language stage saw {last["pictures"]:,} pictures in {last["step"]:,} steps.
Right answers in percent with all tokens, token for token on validation scenes: {right}.
"""


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, required=True, help="folder of the language stage, with its log")
    parser.add_argument("--out", type=Path, required=True, help="where the files go")
    package(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
