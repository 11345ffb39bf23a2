"""What a fast path was compiled from, so that a change behind its back is seen before it answers with what was.

Every request asks, so the check is flat lists and C loops, a fraction of a millisecond for the two thousand tensors and
modules of a 7B model. Writing through `parameter.data` leaves no trace in versions and addresses and is not seen.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from diffprune.fast.options import NotCompiled

AGAIN = "set vlm.fast = None and compile() again"
# Registered by those who run the model, not by who changes it: transformers' own recording of hidden states.
OWN_HOOKS = ("transformers.", "diffprune.")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
version_of = attrgetter("_version")


class Seal:
    """The model, method and rules that a fast path was compiled for; `NotCompiled` where they are others by now."""

    def __init__(self, vlm: Any) -> None:
        self.vlm = vlm
        self.method, self.rules = vlm.method, rules_of(vlm)
        self.holders, self.names = settings_of(vlm.method)
        self.values = list(map(dict.get, self.holders, self.names))
        self.base, self.own = Parts({"model": vlm.base}), Parts({"method": vlm.method})
        if hooked := self.base.foreign_hooks() or self.own.foreign_hooks():
            raise ValueError(
                f"the fast path calls no hooks, and {hooked} has one; remove it before compile(), "
                "or do without (generate() works as it is)"
            )

    def check_rules(self) -> None:
        """Refuse another method, or another rule for positions, newlines or tiles."""
        if self.vlm.method is not self.method:
            raise NotCompiled(
                f"the method was {self.method.name!r} when it was compiled and is {self.vlm.method.name!r} now; {AGAIN}"
            )
        for name, now in rules_of(self.vlm).items():
            if now != self.rules[name]:
                raise NotCompiled(f"{name} was {self.rules[name]!r} when it was compiled and is {now!r} now; {AGAIN}")

    def check_weights(self) -> None:
        """Refuse other weights, modules, hooks or settings of the method."""
        if list(map(dict.get, self.holders, self.names)) != self.values:
            raise NotCompiled(f"a setting of {self.method.name!r} was changed after compile(); {AGAIN}")
        if changed := self.base.changed() or self.own.changed():
            raise NotCompiled(f"{changed} after compile(); {AGAIN}")


def rules_of(vlm: Any) -> dict[str, Any]:
    """What else than the method says which tokens stay, and where."""
    return {"positions": vlm.positions, "newline": vlm.backbone.keeps_newlines, "budget": vlm.budget_rule}


def settings_of(method: nn.Module) -> tuple[list[dict[str, Any]], list[str]]:
    """Where plain values and options of a method and its parts lie: the attributes of a module, and a name in them."""
    plain = (bool, int, float, str)
    found = [
        (vars(module), name)
        for module in method.modules()
        for name, value in vars(module).items()
        if isinstance(value, plain) or name == "options"
    ]
    return [attributes for attributes, _ in found], [name for _, name in found]


class Parts:
    """The tensors, submodules, forwards and hooks of some modules, as they were when this was made."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self.modules = [
            (f"{root}.{name}".rstrip("."), module)
            for root, top in roots.items()
            for name, module in top.named_modules(remove_duplicate=False)
        ]
        held = [
            (f"{name}.{key}", holder, key, holder.get(key))
            for name, module in self.modules
            for holder, keys in places_of(module)
            for key in keys
        ]
        self.names, self.keys = [name for name, *_ in held], [key for *_, key, _ in held]
        self.holders, self.objects = [holder for _, holder, *_ in held], [value for *_, value in held]
        tensors = [value for value in self.objects if isinstance(value, Tensor)]
        self.tensors: list[Tensor] = tensors
        self.versioned = [tensor for tensor in tensors if not tensor.is_inference()]  # the others have no version
        self.addresses, self.versions = list(map(Tensor.data_ptr, tensors)), list(map(version_of, self.versioned))
        self.hooks = [getattr(module, hooks) for _, module in self.modules for hooks in HOOKS]
        self.num_hooks = list(map(len, self.hooks))

    def changed(self) -> str:
        """What is not as it was, in words; empty where all is."""
        now = list(map(dict.get, self.holders, self.keys))
        if not all(map(is_, now, self.objects)):
            return f"{first_of(self.names, map(is_, now, self.objects))} was replaced"
        for tensors, trace, before in (
            (self.tensors, Tensor.data_ptr, self.addresses),
            (self.versioned, version_of, self.versions),
        ):
            if (after := list(map(trace, tensors))) != before:
                (first, *_) = [each for each, a, b in zip(tensors, before, after, strict=True) if a != b]
                return f"{first_of(self.names, (value is not first for value in self.objects))} was changed"
        if list(map(len, self.hooks)) != self.num_hooks:
            if hooked := self.foreign_hooks():
                return f"{hooked} was given a hook"
            self.num_hooks = list(map(len, self.hooks))
        return ""

    def foreign_hooks(self) -> str:
        """The first module with a hook that is not of those who run the model; empty where none has."""
        for name, module in self.modules:
            for hooks in HOOKS:
                registered = list(getattr(module, hooks).values())
                if any(not str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS) for hook in registered):
                    return name
        return ""


def places_of(module: nn.Module) -> list[tuple[dict[str, Any], list[str]]]:
    """Where a module holds what it computes with: dictionaries, and names in them."""
    buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    return [
        (module._parameters, list(module._parameters)),  # type: ignore[list-item]
        (module._buffers, buffers),  # type: ignore[list-item]
        (module._modules, list(module._modules)),  # type: ignore[list-item]
        (vars(module), ["forward"]),  # there is none, unless somebody put one before that of the class
    ]


def first_of(names: list[str], same: Iterable[bool]) -> str:
    return next(name for name, is_same in zip(names, same, strict=True) if not is_same)
