"""Lets a torchvision built for CUDA be imported beside a torch built for the CPU.

lmms-eval requires torchvision, and the package index has it for CUDA alone: its compiled half does not load beside a
CPU torch, its operators `nms` and `qnms` are never declared, and `import torchvision` fails where it looks them up.
Declared before, the import goes through; transforms, which are plain Python, work, and the compiled operators do not.

    python tests/integrations/torchvision_shim.py

installs this file into the interpreter's own environment, where every process that starts there loads it first. Beside
a torch with CUDA it does nothing.
"""

import importlib.abc
import shutil
import sys
import sysconfig
from pathlib import Path

NAME = "_diffprune_torchvision_shim"
_declared = []  # a declaration lives as long as its library object


class Declare(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _declared.append(library)
        return None


def install() -> Path:
    """Copies this file into the environment, with the `.pth` line that loads it at every start."""
    folder = Path(sysconfig.get_paths()["purelib"])
    shutil.copy(__file__, folder / f"{NAME}.py")
    (folder / f"{NAME}.pth").write_text(f"import {NAME}\n")
    return folder


if __name__ == "__main__":
    print(f"torchvision beside a CPU torch: installed into {install()}")
elif __name__ == NAME and "torchvision" not in sys.modules:
    sys.meta_path.insert(0, Declare())
