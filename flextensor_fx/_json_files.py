"""Values in JSON files of ours: an object with "format", "version" and the value, and one clear error for any other file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from ._json_values import ValueMismatch, decode, encode
from .errors import OffloadError

T = TypeVar("T")


@dataclass(frozen=True)
class JsonFormat(Generic[T]):
    """One kind of file.

    Fields:
        value: the dataclass that it holds.
        noun: what the value is called, "report", in the file and in messages.
        version: of its fields.
        error: what is raised where a file cannot be used.
        writer: the call that writes such files, for messages.
        again: what makes a new one, for messages.
    """

    value: type[T]
    noun: str
    version: int
    error: type[OffloadError]
    writer: str
    again: str

    @property
    def name(self) -> str:
        """What stands under "format"."""
        return f"flextensor_fx {self.noun}"

    def to_text(self, value: T) -> str:
        """One object: "format", "version", and the value's fields by name, under its noun."""
        data = {"format": self.name, "version": self.version, self.noun: encode(value)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    def from_text(self, text: str | bytes, who: str) -> T:
        """The value that `to_text` wrote.

        Raises:
            `error`: `text` is no JSON, not of this format or version, or damaged; `who` says where it is from.
        """
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise self.error(f"{who}: expected a {self.noun}, found JSON that is nested too deeply") from None
        except ValueError as error:
            raise self.error(f"{who}: expected JSON, found: {error}; {self.again}") from None
        if not isinstance(data, dict) or data.get("format") != self.name:
            raise self.error(
                f'{who}: expected a {self.noun}, an object with "format": "{self.name}", found other JSON; give a file that '
                f"{self.writer} wrote, by a name in .json"
            )
        version = data.get("version")
        if version != self.version or isinstance(version, bool):
            raise self.error(
                f"{who}: expected version {self.version} of the format, found {ascii(version)[:40]}; read it with the release "
                f"that wrote it, or {self.again} with this one"
            )
        try:
            return decode(self.value, data.get(self.noun), self.noun)
        except ValueMismatch as error:
            raise self.error(f"{who}: {error}; {self.again}") from None

    def save(self, value: T, file: str | os.PathLike[str]) -> None:
        """Writes `to_text(value)` to `file`, whatever it is called.

        Raises:
            `error`: the file cannot be written.
        """
        self.write(self.to_text(value), file)

    def write(self, text: str, file: str | os.PathLike[str]) -> None:
        """Writes a text, which may have been made of the value in another form.

        Raises:
            `error`: the file cannot be written.
        """
        path = Path(file)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise self.error(f"{self._who(path)}: cannot be written: {error.strerror or error}") from error

    def load(self, file: str | os.PathLike[str]) -> T:
        """The value that `save` wrote.

        Raises:
            `error`: the file cannot be read, or `from_text` refuses it.
        """
        path = Path(file)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self.error(f"{self._who(path)}: cannot be read: {error.strerror or error}") from error
        return self.from_text(data, self._who(path))

    def _who(self, path: Path) -> str:
        return f"{self.noun} file {str(path)!r}"


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}, which JSON does not have")
