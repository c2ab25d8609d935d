"""What a request asks of a replica, as far as a router can tell: it has no tokenizer."""

from dataclasses import dataclass

from wsbatch.messages import GenerateRequest, Limits

BYTES_PER_TOKEN = 4
"""Of text, about."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a replica must take for a request to be sent there, as far as is known: a text's tokens are not."""

    model_len: int
    message_bytes: int
    logprobs: int

    def met_by(self, limits: Limits) -> bool:
        """Whether a replica with these limits takes it."""
        return (
            self.model_len <= limits.max_model_len
            and self.message_bytes <= limits.max_message_bytes
            and self.logprobs <= limits.max_logprobs
        )


def needs(request: GenerateRequest) -> Needs:
    """Of a request that nobody has refused yet."""
    prompt = len(request.token_ids) if request.token_ids is not None else 1
    # Where no length is asked for, what is left of the context will do.
    return Needs(prompt + (request.sampling.max_tokens or 1), 0, request.sampling.logprobs or 0)


def estimated_tokens(request: GenerateRequest) -> int:
    """Prompt and output of a request, before any tokenizer has seen it."""
    size = sum(len(turn.content) for turn in request.messages or ()) + len(request.prompt or "")
    prompt = len(request.token_ids or ()) + size // BYTES_PER_TOKEN
    return prompt + request.sampling.most_tokens
