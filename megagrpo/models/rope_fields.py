"""The rotary embedding's fields of a config.json, in the spelling of any version of transformers."""

from typing import Any

SUPPORTED_ROPE = ("default", "linear", "llama3")  # by all families
DEFAULT_THETA = 10000.0
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters, with `rope_type` and `rope_theta`.

    transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling (type or rope_type).
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = _type_of(rope)
    rope.pop("type", None)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = raw.get("rope_theta", DEFAULT_THETA)
    return rope


def rope_problems(raw: dict[str, Any], family_types: tuple[str, ...] = ()) -> list[str]:
    """Return what is unsupported, missing or contradictory, one line each.

    Args:
        family_types: what the family supports beside `SUPPORTED_ROPE`.
    """
    given = {name: raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)}
    for name, rope in given.items():
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            return [f"{name}: {rope!r}: must hold one rotary embedding for all layers"]
        if rope.get("type", _type_of(rope)) != _type_of(rope):
            return [f"{name}: type {rope['type']!r} contradicts rope_type {rope['rope_type']!r}"]
    problems = []
    if len(given) == 2:
        new, old = given.values()
        shared = (new.keys() & old.keys()) - {"type", "rope_type"}
        if _type_of(new) != _type_of(old) or any(new[key] != old[key] for key in shared):
            problems.append(f"rope_scaling: {old} contradicts rope_parameters: {new}; keep one of them")
    theta = raw.get("rope_theta")
    if "rope_theta" in raw and not (theta is None and any("rope_theta" in rope for rope in given.values())):
        if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
            shown = "null" if theta is None else repr(theta)
            problems.append(f"rope_theta: {shown}: must be a number above 0")
        for name, rope in given.items():
            if "rope_theta" in rope and rope["rope_theta"] != theta:
                problems.append(f"rope_theta: {theta} contradicts {name}.rope_theta: {rope['rope_theta']}")
    rope = read_rope(raw)
    name = next(iter(given), "rope_parameters")
    if rope["rope_type"] not in SUPPORTED_ROPE + family_types:
        supported = ", ".join(SUPPORTED_ROPE + family_types)
        problems.append(f"{name}: type {rope['rope_type']!r} is not supported (supported: {supported})")
    else:
        problems += [f"{name}.{key}: missing" for key in _NEEDED[rope["rope_type"]] if rope.get(key) is None]
    return problems


def _type_of(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))
