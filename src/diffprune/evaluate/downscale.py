"""`downscale`, what people do instead of pruning: a smaller picture, and the full model behind it.

It acts before the vision tower, so it is a control, of quality and of speed, and no `Pruner`. A picture is given in the
largest form (`Backbone.forms`) that becomes at most K tokens.
"""

from collections.abc import Iterable
from itertools import chain

from PIL import Image

from diffprune.backbones.forms import Form, with_setting
from diffprune.evaluate.encoded import EncodedQuestions, all_asked, picture_key, reencode
from diffprune.evaluate.pictures import EncodedPictures
from diffprune.evaluate.sources import Questions
from diffprune.model import PrunedVLM
from diffprune.types import Budget

DOWNSCALE = "downscale"


def require_forms(vlm: PrunedVLM) -> None:
    """A `ValueError` where a family scales every picture to one size."""
    if next(vlm.backbone.forms((64, 64)), None) is None:
        raise ValueError(
            f"the {vlm.backbone.family} family scales every picture to one size, so a smaller one has as many tokens; "
            f"leave {DOWNSCALE} out"
        )


def shrink(vlm: PrunedVLM, size: tuple[int, int], keep: int | float, *, alone: bool = True) -> Form | None:
    """The largest form of a picture of (width, height) within the budget, or None where there is none so small.

    Args:
        alone: Whether it is the only picture of its prompt.
    """
    forms = vlm.backbone.forms(size, alone=alone)
    first = next(forms)
    most = Budget(keep).count(first.num_visual)
    return next((form for form in chain([first], forms) if form.num_visual <= most), None)


def no_form(vlm: PrunedVLM, size: tuple[int, int], keep: int | float, *, alone: bool = True) -> str:
    """The sentence for a budget below what a picture of (width, height) can be made to have."""
    least = min(form.num_visual for form in vlm.backbone.forms(size, alone=alone))
    return (
        f"{DOWNSCALE} has no row at keep={keep}: a picture of {size[0]} x {size[1]} pixels has at least {least} tokens "
        f"in {vlm.backbone.family}"
    )


def with_form(vlm: PrunedVLM, form: Form) -> PrunedVLM:
    """The full model that takes pictures, scaled to the form's size, in that form."""
    return vlm if form.setting is None else PrunedVLM(vlm.base, with_setting(vlm.processor, *form.setting))


def unreached(vlm: PrunedVLM, questions: Questions, budgets: Iterable[int | float]) -> dict[int | float, str]:
    """The budgets below what some picture can be made to have, each with a sentence that says so."""
    found: dict[int | float, str] = {}
    shown = {
        (picture_key(image), len(question.images) == 1): image
        for question in all_asked(questions)
        for image in question.images
    }
    sizes = questions.sizes_of(list(shown.values()))
    kinds = sorted({(size, alone) for size, (_, alone) in zip(sizes, shown, strict=True)})
    for keep in budgets:
        for size, alone in kinds:
            if shrink(vlm, size, keep, alone=alone) is None:
                found[keep] = no_form(vlm, size, keep, alone=alone)
                break
    return found


def shrunk_questions(
    vlm: PrunedVLM, encoded: EncodedQuestions, keep: int | float, *, batch_size: int
) -> EncodedQuestions:
    """The questions about pictures that were made smaller, each encoded once."""
    questions, images = encoded.questions, encoded.images
    alone = [True] * len(images)
    for rows in encoded.rows:
        for row in rows:
            alone[row] = len(rows) == 1
    known: dict[tuple[tuple[int, int], bool], Form | None] = {}
    by_setting: dict[str, list[int]] = {}
    forms: list[Form] = []
    for row, kind in enumerate(zip(questions.sizes_of(images), alone, strict=True)):
        if kind not in known:
            known[kind] = shrink(vlm, kind[0], keep, alone=kind[1])
        form = known[kind]
        assert form is not None, "budgets that cannot be reached are left out before"
        forms.append(form)
        by_setting.setdefault(str(form.setting), []).append(row)

    def scaled(row: int) -> Image.Image:
        (picture,) = questions.open([images[row]])
        return picture.resize(forms[row].size, Image.Resampling.BICUBIC)

    parts: list[EncodedPictures] = []
    order: list[int] = []
    for rows in by_setting.values():
        together = [bool(encoded.together) and encoded.together[row] for row in rows]
        smaller = with_form(vlm, forms[rows[0]])
        parts.append(reencode(smaller, rows, together, opened=scaled, batch_size=batch_size))
        order += rows
    if not parts:
        return encoded
    joined = EncodedPictures.join(parts)
    return encoded.with_pictures(vlm, joined.take([order.index(row) for row in range(len(order))]))
