"""What a client may send: the request bodies as pydantic models, and the fields that are refused.

Every body goes through `body.validate`: fields of a `REFUSED` table must be neutral, the model's own fields
must have the right type and range, null means the default, and names nobody knows are ignored.
"""

from jaxserve.server.schema.chat import REFUSED_CHAT, ChatBody, Message, validate_chat
from jaxserve.server.schema.completion import REFUSED_COMPLETION, CompletionBody, validate_completion
from jaxserve.server.schema.errors import shown
from jaxserve.server.schema.generation import GenerationBody

__all__ = [
    "REFUSED_CHAT",
    "REFUSED_COMPLETION",
    "ChatBody",
    "CompletionBody",
    "GenerationBody",
    "Message",
    "shown",
    "validate_chat",
    "validate_completion",
]
