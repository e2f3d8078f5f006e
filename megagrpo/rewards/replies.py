"""Reads what a worker answers. A reply is data of exactly one of four forms, or it is malformed: reward code
shares the worker's process and may have written it.
"""

from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from megagrpo.rewards.messages import Failed, Ready, Refused, Reply, Scores

MAX_MESSAGE_CHARACTERS = 2000
_READER: TypeAdapter[Reply] = TypeAdapter(
    Annotated[Ready | Scores | Failed | Refused, Field(discriminator="kind")]
)


def decode_reply(body: bytes) -> Reply:
    """Return the reply, its messages on one line and of bounded length.

    Raises:
        ValueError: it is no reply: not JSON, another field, another type, a number that is not finite.
    """
    try:
        reply = _READER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    if isinstance(reply, Failed):
        return Failed(reply.outcome, _one_line(reply.detail))
    return Refused(_one_line(reply.message)) if isinstance(reply, Refused) else reply


def _one_line(text: str) -> str:
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())[:MAX_MESSAGE_CHARACTERS]
