"""Types of fields that are supported at the values without an effect only.

Other values change what a server generates; a teacher generates nothing.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

Zero: TypeAlias = Annotated[float, Field(ge=0, le=0)] | None
One: TypeAlias = Annotated[float, Field(ge=1, le=1)] | None
Off: TypeAlias = Literal[False] | None
EmptyList: TypeAlias = Annotated[list[Any], Field(max_length=0)] | None
EmptyObject: TypeAlias = Annotated[dict[str, Any], Field(max_length=0)] | None

#: Limits of what is generated: nothing is.
MaxTokens: TypeAlias = Literal[0, 1]
