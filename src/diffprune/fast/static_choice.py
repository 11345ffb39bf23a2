"""A method's choice as a function of static tensors: by its scorer's compiled form, or by the method's own code."""

from typing import Any

from torch import Tensor

from diffprune.backbones.base import with_needs
from diffprune.backbones.prompts import Batch
from diffprune.fast import verify
from diffprune.fast.choice import Choose, choose_by_score, choose_diverse, take
from diffprune.fast.vision import FastScorer
from diffprune.methods.base import ScoringPruner
from diffprune.methods.diffprune_diverse import DiffPruneDiverse
from diffprune.types import VisualTokens


def static_choice(vlm: Any, tokens: VisualTokens, k: int, *, scorer: FastScorer | None, compiler: Any) -> Choose | None:
    """What chooses k of each picture's tokens; None where the method needs more, or reads values back.

    Args:
        tokens: Whose features the choice is called with.
        scorer: The method's scorer as functions; it is used where it gives the scorer's own logits.
        compiler: Of the small steps around the scorer.
    """
    method = vlm.method
    if k == tokens.x.shape[1] or method.is_inside:
        return None
    if scorer is not None and isinstance(method, ScoringPruner | DiffPruneDiverse):
        score, probe = scorer.fix(tokens), verify.varied(tokens)
        by_hidden = isinstance(method, DiffPruneDiverse) and method.options.features == "scorer"
        read = scorer.fix_both(tokens) if by_hidden else lambda x: (score(x), None)
        if verify.close(read(probe.x)[0], method.score(probe), limit=verify.rounding(vlm.base.dtype)):
            if isinstance(method, ScoringPruner):
                return choose_by_score(score, k, compiler)
            return choose_diverse(read, method, tokens, k, compiler)
    if "text" in method.needs or not method.is_exact:
        return None

    def current() -> VisualTokens:
        return with_needs(vlm.backbone, Batch(features={}), tokens, method.needs & {"projected"})

    def own_choice(x: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> None:
        if method.is_merging:
            kept, keep = method.deploy(current(), k)
        else:
            keep = method.choose(current(), k).keep
            kept = take(x, keep)
        into[0].copy_(keep)
        into[1].copy_(kept)

    choose: Choose = own_choice
    if isinstance(method, ScoringPruner):
        choose = choose_by_score(lambda x: method.score(current()), k, compiler)
    alone = verify.depends_on_features_alone(method, current(), k)
    captures = tokens.x.device.type == "cuda"
    if not alone or (captures and not verify.capturable(choose, tokens.x, k, warn=vlm._say_once)):
        return None
    return choose
