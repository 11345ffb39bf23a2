"""Forward passes of the reference models in training, over the stock modules: the tower's states, the answers' loss."""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionModel, LlavaForConditionalGeneration, LlavaNextForConditionalGeneration
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from diffprune_lab.pretrain import prefixes, turns
from diffprune_lab.pretrain.feed import Batch

# Kept tokens and which they are, to all states of the picture, their places in the prompt, and which are no padding.
Place = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

# The mean and deviation of the stock CLIP image processor.
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def normalise_pixels(pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
    """Pixels as the stock CLIP image processor gives them."""
    mean, deviation = (torch.tensor(channels, device=pixels.device).view(3, 1, 1) for channels in (MEAN, DEVIATION))
    return (pixels / 255 - mean) / deviation


def blocks_of(tower: CLIPVisionModel) -> list[CLIPEncoderLayer]:
    """The blocks of the tower."""
    return [cast(CLIPEncoderLayer, block) for block in tower.encoder.layers]


def tower_block(block: CLIPEncoderLayer, states: Float[Tensor, "B M D"]) -> Float[Tensor, "B M D"]:
    """One stock CLIP block."""
    return block(states, None)


def tower_states(
    tower: CLIPVisionModel, pixels: UInt8[Tensor, "B 3 H W"], *, last: bool, block_function=tower_block
) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B M D"]]:
    """(features, last): hidden states of the last but one block and, if asked for, of the last; [CLS] comes first."""
    states = tower.pre_layrnorm(tower.embeddings(normalise_pixels(pixels)))
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        states = states.to(torch.get_autocast_dtype(kind))  # half the traffic between the blocks
    *before, final = blocks_of(tower)
    for block in before:
        states = block_function(block, states)
    return states, block_function(final, states) if last else states


def items_of(batch: Batch, patch: int) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]:
    """The item of each visual token, and how many pixels of any item its patch shows."""
    return prefixes.item_of_tokens(batch["owner"], batch["tagged"], patch, least=patch * patch // 16)


@torch.no_grad()
def whiten_patches_(tower: CLIPVisionModel, pixels: UInt8[Tensor, "B 3 H W"], item: Int[Tensor, "B N"]) -> None:
    """Starts the patch embedding as a whitening of the patches that show items, with deviation 0.5.

    Patches are nearly flat, so random filters see hardly more than their mean color; shapes and letters lie in the
    directions of small variance, which a whitening brings to the size of the others.
    """
    embeddings = tower.embeddings
    size, width = embeddings.patch_embedding.kernel_size[0], embeddings.embed_dim
    patches = functional.unfold(normalise_pixels(pixels), size, stride=size).transpose(1, 2)[item > 0]  # [X, 3 * P * P]
    mean = patches.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov(patches.T))  # ascending
    variances, directions = variances[-width:], directions[:, -width:]
    gain = 0.5 / (variances + 1e-2 * variances.mean()).sqrt()
    filters = (directions * gain).T  # [D, 3 * P * P]
    embeddings.patch_embedding.weight.copy_(filters.view_as(embeddings.patch_embedding.weight))
    embeddings.position_embedding.weight[1:] -= filters @ mean  # the embedding has no bias to take the mean off


@torch.no_grad()
def scale_features_(tower: CLIPVisionModel, factor: float) -> None:
    """Multiplies all hidden states of the tower by `factor` and changes nothing else that it computes.

    Every block reads the residual stream through a LayerNorm, which does not see its scale; so scaling all that is
    written to the stream (by the first norm and by each block's two output projections) scales the stream alone.
    """
    writers: list[nn.LayerNorm | nn.Linear] = [tower.pre_layrnorm]
    for block in blocks_of(tower):
        writers += [block.self_attn.out_proj, block.mlp.fc2]
    for writer in writers:
        writer.weight.mul_(factor)
        writer.bias.mul_(factor)


def cls_attention(tower: CLIPVisionModel, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B N"]:
    """How much [CLS] looks at each visual token in the block that writes the features, as a mean over heads."""
    states = tower.pre_layrnorm(tower.embeddings(normalise_pixels(pixels)))
    *before, block, _ = blocks_of(tower)
    for earlier in before:
        states = earlier(states, None)
    attention, normed = block.self_attn, block.layer_norm1(states)
    query, key = (
        projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).float()
        for projected in (attention.q_proj(normed[:, :1]), attention.k_proj(normed))
    )
    return (query @ key.transpose(-1, -2) * attention.scale).softmax(-1).mean(1)[:, 0, 1:]


def answer_loss(
    model: LlavaForConditionalGeneration | LlavaNextForConditionalGeneration,
    features: Float[Tensor, "B N D"],
    keep: Int[Tensor, "B K"],
    batch: Batch,
    start_ids: Int[Tensor, " S"],
    *,
    place: Place | None = None,
    placeholders: int | None = None,
    parts: turns.LayerParts = turns.PLAIN,
) -> tuple[Float[Tensor, ""], Int[Tensor, "B T"], turns.TurnLayout]:
    """(loss, guesses, layout): the weighted loss of the answers given the kept tokens, and the likeliest tokens.

    Args:
        features: Visual features of all tokens.
        keep: The tokens that stay, at their original positions.
        batch: The packed turns.
        start_ids: Token ids in front of the picture.
        place: Puts the kept tokens, in the language model's space, among what else stands for the picture.
        placeholders: Positions the whole picture takes; default: as many as it has tokens.
        parts: The parts of a decoder layer, as they are or compiled.
    """
    language, start = model.model.language_model, len(start_ids)
    layout = turns.turn_layout(batch["ids"], batch["lengths"], batch["answers"])
    kept = features.gather(1, keep[:, :, None].expand(-1, -1, features.shape[-1]))
    visual, slots, real = model.model.multi_modal_projector(kept), keep, None
    if place is not None:
        visual, slots, real = place(visual, keep)
    embedded = language.embed_tokens(torch.cat((start_ids.expand(len(keep), -1), batch["ids"]), dim=1)).to(visual.dtype)
    steps = torch.arange(start, device=keep.device).expand(len(keep), -1)
    states = turns.shared_prefix_states(
        language,
        torch.cat((embedded[:, :start], visual), dim=1),
        torch.cat((steps, slots + start), dim=1),
        embedded[:, start:],
        layout.offset + start + (features.shape[1] if placeholders is None else placeholders),
        layout.turn,
        real=None if real is None else torch.cat((torch.ones_like(steps, dtype=torch.bool), real), dim=1),
        parts=parts,
    )
    return *turns_loss(model.lm_head(states).float(), layout), layout


def turns_loss(
    logits: Float[Tensor, "B T V"], layout: turns.TurnLayout
) -> tuple[Float[Tensor, ""], Int[Tensor, "B T"]]:
    """(loss, guesses): the weighted loss of the answers among the turns' tokens, and the likeliest tokens."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1), layout.target.flatten(), ignore_index=turns.IGNORE, reduction="none"
    )
    loss = (losses * layout.weight.flatten()).sum() / layout.weight.sum()
    return loss, logits.argmax(-1)


def right_turns(guesses: Int[Tensor, "B T"], layout: turns.TurnLayout, most: int) -> Float[Tensor, "B M"]:
    """1 for every turn whose answer is right token for token, else 0; M is `most`, the most turns of a picture."""
    wrong = ((guesses != layout.target) & (layout.target != turns.IGNORE)).float()
    count = torch.zeros(len(guesses), most + 1, device=guesses.device).scatter_add_(1, layout.turn, wrong)
    return (count[:, :most] == 0).float()
