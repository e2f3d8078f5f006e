"""The base of all configuration sections, and their number types."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Free:
    """The type of `FREE`."""


# Marks a field, or a whole section, that may differ when a run goes on from a checkpoint:
# Annotated[PositiveInt, FREE]. It changes where and how fast things are computed, or what is reported, not
# what is learned.
FREE = _Free()


class Section(BaseModel):
    """Base of all sections: frozen, typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
