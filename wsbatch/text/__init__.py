"""Text to ids and back: chat templates, tokenizing, incremental detokenizing, stop strings. No torch."""

from wsbatch.text.codec import ByteText, HuggingFaceText, TextCodec
from wsbatch.text.detokenize import Detokenizer, StopText

__all__ = ["ByteText", "Detokenizer", "HuggingFaceText", "StopText", "TextCodec"]
