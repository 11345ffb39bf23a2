"""Token labels: a classifier in training also says what each patch shows.

Photographs of a class share their background, and few of them are there, so a classifier trained on the class alone
reads the meadow as well as the cow, and no loss of its answers has a reason to prefer the cow. Large models have seen
enough to know better. With labels of tokens a small one learns that background says nothing: every patch names its
class inside the object's box and background outside (LV-ViT's token labelling), and a part of a picture has to answer
for the objects it shows and for nothing where it shows none. The boxes are those of training pictures, and no scorer
sees one but the supervised upper bound.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

LABELS = "tokens"  # what a training's record calls these labels
TOKEN_WEIGHT = 1.0  # of the patches' loss beside the picture's; with 0.5, LV-ViT's, scorers found less of the object


def token_targets(labels: Int[Tensor, " B"], inside: Float[Tensor, "B N"], num_classes: int) -> Float[Tensor, "B N C1"]:
    """Each patch's class where it lies inside the box, and one more class, background, where it does not."""
    named = inside.unsqueeze(-1) * F.one_hot(labels, num_classes).unsqueeze(1)
    return torch.cat([named, 1 - inside.unsqueeze(-1)], dim=-1)


def part_targets(shown: Float[Tensor, "B S C1"]) -> Float[Tensor, "B classes"]:
    """Targets of a part of a picture: the classes its patches show; uniform where they show none."""
    classes = shown[..., :-1].sum(1)  # patches of each class
    num_object = classes.sum(-1, keepdim=True)
    sure = num_object.clamp(max=1)  # one whole patch is enough
    return sure * classes / num_object.clamp(min=1e-6) + (1 - sure) / classes.shape[-1]
