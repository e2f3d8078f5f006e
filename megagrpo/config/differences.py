"""What a configuration says beyond the defaults."""

import json

from pydantic import BaseModel


def differences(config: BaseModel, prefix: str = "") -> list[str]:
    """Return `PLACE: VALUE (default DEFAULT)` of each field whose value is not its default."""
    lines = []
    for name, field in type(config).model_fields.items():
        value, place = getattr(config, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            lines += differences(value, f"{place}.")
        elif field.is_required():
            lines.append(f"{place}: {_show(value)}")
        elif value != (default := field.get_default(call_default_factory=True)):
            lines.append(f"{place}: {_show(value)} (default {_show(default)})")
    return lines


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_show, value)) or "none"
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", value))
    if isinstance(value, str) and value.isprintable() and value:
        return value
    return json.dumps(value, default=str, ensure_ascii=False)  # a line break is seen
