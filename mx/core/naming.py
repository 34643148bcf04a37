"""The layer that each tensor belongs to, guessed from its name, and the order in which layers run.

Models name their tensors by the module tree: `model.layers.17.mlp.up_proj.weight`. A *stem* is
the part before the first number (`model.layers`). If modules, not bare weights, hang below its
numbers, the stem is a *tower*, and each number is a layer; bare weights make one where nothing else
does. A tensor without a tower's number in
its name runs before the tower (embeddings) or after it (norms, heads). Models with several towers
(T5, vision-language, VAEs) have *sections*, one per parent of a tower, each with its own before
and after. A model that fits none of this is cut by size. Nothing here is ever an error: a wrong
guess makes layers ready in a less useful order, not wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mx.units import MIB

#: The size at which models that fit no pattern are cut into layers, in bytes.
PART_NBYTES = 256 * MIB
#: No model has more layers than this by name, and a longer list of layers would be unreadable.
MAX_NAMED_LAYERS = 4096

_NUMBER = re.compile(r"\.([0-9]+)\.")
_DIGITS = re.compile(r"([0-9]+)")
_MIDDLE = re.compile(r"(?:^|\.)(?:mid_block|middle_block)(?=\.|$)")
_BEFORE = re.compile(
    r"embed|wte|wpe|rotary|patch|position|token_type|(?:cls|class|mask|register)_token|shared"
    r"|conv_in|(?:^|\.)(?:conv1|conv2|bn1|stem)\.|pre_lay|ln_pre|time_|pos_|proj(?:ect)?_in|_in\."
)
_NOT_BEFORE = re.compile(r"embed_out|unembed|output_embed|time_proj_out")
_BRIDGE = re.compile(r"proj|connector|merger|resampler|modal")
_SENSES = re.compile(r"vision|visual|image|img|audio|speech")

NaturalKey = tuple[str | tuple[int, str], ...]


@dataclass
class _Section:
    """The towers below one module, with the tensors that run before and after them."""

    path: str
    before: list[str] = field(default_factory=list)
    layers: list[tuple[str, list[str]]] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def natural_key(text: str) -> NaturalKey:
    """Return a key that sorts "layer.10" after "layer.9".

    It does not convert digits to numbers, since a name may have thousands of them.
    """
    parts = _DIGITS.split(text)
    return tuple(_number_key(p) if i % 2 else p for i, p in enumerate(parts))


def layers_in_execution_order(
    names: Iterable[str], nbytes: Mapping[str, int]
) -> list[tuple[str, list[str]]]:
    """Group tensor names into layers.

    Args:
        names: The names, all different, in any order.
        nbytes: Each tensor's size; it only matters for models that fit no known structure.

    Returns:
        [(layer name, names of its tensors)], both in execution order, independent of the order of
        `names`. Every name is in exactly one layer, no layer is empty, layer names are unique.
    """
    ordered = list(names)
    towers, loose = _find_towers(ordered)
    if not towers or sum(len(numbers) for numbers in towers.values()) > MAX_NAMED_LAYERS:
        return _by_size(ordered, nbytes)
    sections = _sections(towers)
    embed, head = _place_loose(loose, sections)
    # The outermost "before" and "after" belong to the model, whatever tower they are named for.
    embed += sections[0].before
    head = sections[-1].after + head
    found = [("embed", _sorted(embed))]
    for section in sections:
        if section is not sections[0]:
            found.append((f"{section.path or 'root'}.embed", _sorted(section.before)))
        found += section.layers
        if section is not sections[-1]:
            found.append((f"{section.path or 'root'}.head", _sorted(section.after)))
    found.append(("head", _sorted(head)))
    return [(name, members) for name, members in found if members]


# tower stem -> number (as spelt) -> name below the number -> whole name. A middle block has no
# number: it is a tower whose stem is its own path, with the number "".
_Towers = dict[str, dict[str, dict[str, str]]]


def _find_towers(names: list[str]) -> tuple[_Towers, list[str]]:
    stems: _Towers = {}
    loose: list[str] = []
    below: dict[str, str] = {}
    prefix: str | None = None  # of the previous name: the names of one layer mostly are adjacent
    for name in names:
        if prefix is None or not name.startswith(prefix):
            match = _NUMBER.search(name)
            if match is None:
                loose.append(name)
                continue
            start, end = match.span()
            prefix = name[:end]
            below = stems.setdefault(name[:start], {}).setdefault(name[start + 1 : end - 1], {})
        below[name[len(prefix) :]] = name
    towers: _Towers = {}
    bare: _Towers = {}
    for stem, numbers in stems.items():
        middle = _MIDDLE.search(stem)
        if middle is not None:
            members = towers.setdefault(stem[: middle.end()], {}).setdefault("", {})
            for entries in numbers.values():
                members.update((name[middle.end() + 1 :], name) for name in entries.values())
        elif any("." in tail for entries in numbers.values() for tail in entries):
            towers[stem] = numbers
        else:  # bare weights: beside towers a small sequence such as a projector
            bare[stem] = numbers
    if not towers:
        return bare, loose
    for numbers in bare.values():
        loose += [name for entries in numbers.values() for name in entries.values()]
    return towers, loose


def _sections(towers: _Towers) -> list[_Section]:
    stems_of: dict[str, list[str]] = {}
    for stem in towers:
        stems_of.setdefault(stem.rpartition(".")[0], []).append(stem)
    sections = []
    for path in sorted(stems_of, key=lambda p: (_section_rank(p), natural_key(p))):
        section = _Section(path)
        for stem in sorted(stems_of[path], key=lambda s: (_stem_rank(s), natural_key(s))):
            numbers = towers[stem]
            tails: list[str] = []
            for number in sorted(numbers, key=_number_key):
                members = numbers[number]
                # Most layers have the same tails: with 50,000 names, sort them once.
                if len(tails) != len(members) or members.keys() != set(tails):
                    tails = _sorted(list(members))
                label = f"{stem}.{number}" if number else stem
                section.layers.append((label, [members[tail] for tail in tails]))
        sections.append(section)
    return sections


def _number_key(number: str) -> tuple[int, str]:
    return len(number.lstrip("0")), number


def _section_rank(path: str) -> int:
    if _SENSES.search(path):
        return 0
    if "encoder" in path:
        return 1
    return 3 if re.search(r"decoder|head|classif", path) else 2


def _stem_rank(stem: str) -> int:
    last = stem.rpartition(".")[2]
    if last.startswith(("down", "input_")):
        return 0
    return 2 if last.startswith(("up", "output_", "single_")) else 1


def _place_loose(loose: list[str], sections: list[_Section]) -> tuple[list[str], list[str]]:
    """Put each name outside the towers before or after its section; return those without one."""
    embed: list[str] = []
    head: list[str] = []
    paths = [section.path.split(".") for section in sections]
    senses = [section for section in sections if _section_rank(section.path) == 0]
    for name in loose:
        is_before = bool(_BEFORE.search(name)) and not _NOT_BEFORE.search(name)
        owner = sections[0] if len(sections) == 1 else _owner(name, sections, paths)
        if owner is None and not is_before and senses and _BRIDGE.search(name):
            owner = senses[-1]  # it connects the last vision or audio tower to the language model
        if owner is None:
            (embed if is_before else head).append(name)
        else:
            (owner.before if is_before else owner.after).append(name)
    return embed, head


def _owner(name: str, sections: list[_Section], paths: list[list[str]]) -> _Section | None:
    parts = name.split(".")
    shared = []
    for path in paths:
        count = 0
        while count < min(len(path), len(parts)) and path[count] == parts[count]:
            count += 1
        shared.append(count)
    best = max(shared)
    return sections[shared.index(best)] if best and shared.count(best) == 1 else None


def _by_size(names: list[str], nbytes: Mapping[str, int]) -> list[tuple[str, list[str]]]:
    parts: list[list[str]] = []
    free_nbytes = 0
    for name in _sorted(names):
        if not parts or nbytes[name] > free_nbytes:
            parts.append([])
            free_nbytes = PART_NBYTES
        parts[-1].append(name)
        free_nbytes -= nbytes[name]
    return [(f"part.{i}", members) for i, members in enumerate(parts)]


def _sorted(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (natural_key(name), name))
