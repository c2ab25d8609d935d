"""A GGUF model in one file or several, and the account of what was read from it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from wsbatch.model.names import listed

Floats = np.ndarray[Any, np.dtype[np.float32]]


class GgufFile:
    """A GGUF model, and the account of it: every key and every tensor is read by somebody, or refused by name.

    The keys that count are the architecture's and the tokenizer's. All others describe the file, or are some tool's
    notes: no architecture reads them. Keys are given without the architecture's prefix, which they have in the file
    (`context_length` is `llama.context_length`); those that begin with `general.` or `tokenizer.` are given in full.

    Args:
        paths: of its parts, in order.

    Attributes:
        architecture: as `general.architecture` names it.
        tensors: of all parts, by name.

    Raises:
        ValueError: this is no GGUF file, not of one language model, or these are not the parts of one.
    """

    def __init__(self, paths: list[Path]) -> None:
        readers = [_open(path) for path in paths]
        self._fields = readers[0].fields
        self._read: set[str] = set()
        self.architecture = ""
        self.architecture = str(self.need("general.architecture"))
        kind = self.take("general.type", "model")
        if kind != "model":
            raise ValueError(f"it holds no model: general.type is {kind!r}")
        for index, (path, reader) in enumerate(zip(paths, readers, strict=True)):
            number, count = (
                int(reader.fields[key].contents()) if key in reader.fields else default
                for key, default in (("split.no", 0), ("split.count", 1))
            )
            if (number, max(count, 1)) != (index, len(paths)):
                raise ValueError(
                    f"{path.name} is part {number + 1} of {count}: all parts must lie together, each under its name, "
                    f"<model>-{number + 1:05}-of-{count:05}.gguf"
                )
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for each in readers for tensor in each.tensors}
        if len(self.tensors) != sum(len(each.tensors) for each in readers):
            raise ValueError("some tensors are in more than one of its parts")
        self._claimed: set[str] = set()

    def take(self, key: str, default: Any = None, *, many: bool = False) -> Any:
        """The value of a key, which is thereby accounted for; the default where there is none.

        Unless `many` values are meant, a list (one value a layer) must hold the same value throughout.
        """
        name = self._name(key)
        if name not in self._fields:
            return default
        self._read.add(name)
        value = self._fields[name].contents()
        if not isinstance(value, list) or many:
            return value
        if len(set(value)) != 1:
            raise ValueError(f"{name} differs from layer to layer, which is not supported: {value!s:.80}")
        return value[0]

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.take(key)
        if value is None:
            raise ValueError(f"it has no {self._name(key)}")
        return value

    def expect(self, key: str, *neutral: Any) -> None:
        """Accept a key only with values that change nothing. One that was read before is left alone."""
        name = self._name(key)
        if name not in self._read and (value := self.take(key, neutral[0])) not in neutral:
            raise ValueError(f"{name} = {value} is not supported (only {' or '.join(map(str, neutral))})")

    def ignore(self, keys: Iterable[str]) -> None:
        """Account for keys that change nothing, whatever they say."""
        self._read.update(map(self._name, keys))

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin so, in full."""
        return [key for key in self._fields if key.startswith(prefix)]

    def claim(self, tensor: str) -> bool:
        """Account for a tensor; whether it is there."""
        self._claimed.add(tensor)
        return tensor in self.tensors

    def values(self, tensor: str) -> Floats:
        """A tensor dequantised, float32, its dimensions in torch's order."""
        found = self.tensors[tensor]
        try:
            values: Floats = dequantize(found.data, found.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{tensor} is of type {found.tensor_type.name}: {error}") from error
        return values

    def close_account(self) -> None:
        """Refuse what nobody has read. Raises ValueError with the names."""
        own = self.keys(f"{self.architecture}.") + self.keys("tokenizer.")
        if unread := [key for key in own if key not in self._read]:
            raise ValueError(f"not supported for the architecture {self.architecture}: {listed(unread)}")
        if unused := [name for name in self.tensors if name not in self._claimed]:
            raise ValueError(f"it has tensors that a {self.architecture} of its metadata does not: {listed(unused)}")

    def _name(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except Exception as error:
        raise ValueError(f"{path.name} is no GGUF file, or cut short ({error})") from error
