"""Parameters of other servers that this one does not have: refused by name, so that none is silently without effect.

A key that nobody uses is ignored. A key below is one that a client may have set in the belief that it works, and whose
silent loss would change what is generated; it passes only with the value that asks for nothing.
"""

from collections.abc import Mapping

from wsbatch.errors import BadRequest
from wsbatch.wire.fields import shown

# name → (the values that ask for nothing, what to use instead or "")
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    # distributions
    "repetition_penalty": ((1,), ""),
    "presence_penalty": ((0,), ""),
    "frequency_penalty": ((0,), ""),
    "no_repeat_ngram_size": ((0,), ""),
    "min_p": ((0,), ""),
    "typical_p": ((1,), ""),
    "top_a": ((0,), ""),
    "tfs": ((1,), ""),
    "epsilon_cutoff": ((0,), ""),
    "eta_cutoff": ((0,), ""),
    "mirostat": ((0,), ""),
    "xtc_probability": ((0,), ""),
    "dry_multiplier": ((0,), ""),
    "logit_bias": (({}, []), ""),
    "bad_words": (([],), ""),
    "logits_processors": (([],), ""),
    "watermark": ((False,), ""),
    "do_sample": ((), "temperature"),
    # searches and several answers
    "n": ((1,), ""),
    "best_of": ((1,), ""),
    "num_beams": ((1,), ""),
    "use_beam_search": ((False,), ""),
    "beam_search": ((False,), ""),
    "length_penalty": ((1,), ""),
    "early_stopping": ((False,), ""),
    # the form of the answer
    "response_format": (({"type": "text"},), ""),
    "grammar": (("",), ""),
    "json_schema": (({},), ""),
    "guided_json": ((), ""),
    "guided_regex": ((), ""),
    "guided_choice": ((), ""),
    "guided_grammar": ((), ""),
    "structured_outputs": ((), ""),
    "tools": (([],), ""),
    "tool_choice": (("none", "auto"), ""),
    "functions": (([],), ""),
    "suffix": (("",), ""),
    "echo": ((False,), ""),
    "prompt_logprobs": ((0, False), ""),
    "top_logprobs": ((), "logprobs"),
    # length and stopping
    "min_tokens": ((0,), ""),
    "max_new_tokens": ((), "max_tokens"),
    "max_completion_tokens": ((), "max_tokens"),
    "stop_sequences": (([],), "stop"),
    "include_stop_str_in_output": ((False,), ""),
    "skip_special_tokens": ((True,), ""),
    "truncate_prompt_tokens": ((), ""),
    # the prompt
    "system": (("",), "messages"),
    "images": (([],), ""),
    "chat_template": ((), ""),
    "add_generation_prompt": ((True,), ""),
    "lora": ((), ""),
    "adapter_id": ((), ""),
}


def refuse_unsupported(frame: Mapping[str, object]) -> None:
    """Raise BadRequest naming the first parameter that would have no effect. Null always passes."""
    for name in frame.keys() & _UNSUPPORTED.keys():
        value = frame[name]
        neutral, instead = _UNSUPPORTED[name]
        if value is None or any(_same(value, none) for none in neutral):
            continue
        hint = f"; use {instead}" if instead else ""
        raise BadRequest(f"{name}: is not supported (got {shown(value)}){hint}")


def _same(value: object, neutral: object) -> bool:
    # 1 == True in Python; on the wire they are different values.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
