"""Types of fields that are supported at the values without an effect only.

Other values change what a server generates; a teacher generates nothing.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, WithJsonSchema


def _require_false(value: bool) -> bool:
    if value:
        raise ValueError("found true, expected false")
    return value


def _require_true(value: bool) -> bool:
    if not value:
        raise ValueError("found false, expected true")
    return value


# Not literals: 0 equals False, and 1 equals True.
Off: TypeAlias = (
    Annotated[bool, AfterValidator(_require_false), WithJsonSchema({"const": False})] | None
)
On: TypeAlias = Annotated[bool, AfterValidator(_require_true), WithJsonSchema({"const": True})]
Zero: TypeAlias = Annotated[float, Field(ge=0, le=0)] | None
One: TypeAlias = Annotated[float, Field(ge=1, le=1)] | None
IntegerZero: TypeAlias = Annotated[int, Field(ge=0, le=0)] | None
IntegerOne: TypeAlias = Annotated[int, Field(ge=1, le=1)] | None
#: The values that other servers take for all tokens.
AllTokens: TypeAlias = Annotated[int, Field(ge=-1, le=0)] | None
EmptyList: TypeAlias = Annotated[list[Any], Field(max_length=0)] | None
EmptyObject: TypeAlias = Annotated[dict[str, Any], Field(max_length=0)] | None
Null: TypeAlias = Literal[None]

#: Limits of what is generated: nothing is.
MaxTokens: TypeAlias = Annotated[int, Field(ge=0, le=1)]
